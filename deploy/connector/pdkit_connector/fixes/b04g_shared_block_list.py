"""B4g: a resumed request's block list is shared with vLLM's worker, and both append to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """Resume a request with a list of blocks, and see whether the tracker keeps that very list."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    takes = inspect.signature(RequestTracker.update).parameters
    if "preempted" not in takes:
        return ProbeResult(Need.NOT_NEEDED, "a tracker takes no blocks of a resumed request")
    given = [1, 2]
    tracker: Any = object.__new__(RequestTracker)
    tracker.req_id, tracker.token_ids, tracker.allocated_block_ids = "probe", [1, 2], [3]
    tracker.num_saved_tokens = 0
    asked: dict[str, Any] = {"preempted": True, "all_token_ids": [1, 2, 3]}
    tracker.update([3], (given,), **{k: v for k, v in asked.items() if k in takes})
    if tracker.allocated_block_ids is given:
        return ProbeResult(Need.NEEDED, "a resumed request's tracker keeps vLLM's own list")
    return ProbeResult(Need.NOT_NEEDED, "a resumed request's tracker has a list of its own")


def apply(_setting: Setting) -> str:
    """Give the tracker a copy."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    replace_method(RequestTracker, "update", _copying)
    return "it gets a copy"


def _copying(
    update: Callable[..., None],
    self: Any,
    new_token_ids: Any,
    new_block_ids: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    update(self, new_token_ids, _copied(new_block_ids), *args, **kwargs)


def _copied(block_ids: Any) -> Any:
    if isinstance(block_ids, tuple):
        return tuple(map(list, block_ids))
    return list(block_ids) if isinstance(block_ids, list) else block_ids


FIX = Fix(
    id="B4g",
    title="a resumed request's block list is shared with vLLM's worker",
    link="none",
    reason=(
        "After a preemption the tracker keeps the list of blocks that vLLM sent to its worker. An "
        "engine of one rank is one process, so it is the same object: scheduler and worker both "
        "append each new block to it. Later chunks are then saved from the wrong blocks (wrong KV "
        "under a right key), and vLLM's own record of the request is wrong too."
    ),
    probe=probe,
    apply=apply,
)
