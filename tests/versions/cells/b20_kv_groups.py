"""B20: what LMCache would store for a request is the KV of its tokens, in all groups of layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.vllm_v1_adapter import ReqMeta, RequestTracker
from pdkit_connector.registry import Setting

BITES = Setting(engine=True, kv_cache_specs=("FullAttentionSpec", "SlidingWindowSpec"))
BLOCK, BLOCKS, NULL_BLOCK = 4, 4, 0


def cell() -> None:
    wrong = []
    full, window = [3, 4, 5, 6], [8, 9, 10, 11]
    if blocks_stored(full, window) != {*full, *window}:
        wrong.append("the second group's blocks are not stored")
    # vLLM found this prefix in its own cache and LMCache has nothing of it (evicted, say): the
    # window has passed the first two blocks, which vLLM holds no longer.
    if NULL_BLOCK in blocks_stored([NULL_BLOCK, NULL_BLOCK, 7, 8]):
        wrong.append("the null block is stored as a token's KV")
    assert not wrong, "; ".join(wrong)


def blocks_stored(*tables: list[int]) -> set[int]:
    """Return the blocks that the adapter would copy to LMCache for a request's prompt."""
    tokens = BLOCK * BLOCKS
    request: Any = SimpleNamespace(
        req_id="r",
        prompt_token_ids=list(range(tokens)),
        block_ids=tables,
        sampling_params=SimpleNamespace(extra_args=None),
        mm_features=[],
    )
    settings: Any = SimpleNamespace(priority_limit=None)
    tracker = RequestTracker.from_new_request(settings, request, tokens, 0, False)
    metadata = ReqMeta.from_request_tracker(tracker, BLOCK, 2 * BLOCK)
    if metadata is None or not metadata.save_spec.can_save:
        return set()
    slots = metadata.slot_mapping[metadata.save_spec.skip_leading_tokens :]
    return {int(slot) // BLOCK for slot in slots}
