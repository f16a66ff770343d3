"""B16: keys are made of tokens alone, so KV is shared across LoRA adapters and tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import (
    CHUNK,
    LookupClient,
    miniature,
    new_request,
    quiet,
)
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.request_view import FOREIGN, foreign

_told: set[str] = set()


def probe(_setting: Setting) -> ProbeResult:
    """Look up a request of each kind whose tokens are all held."""
    found = [told for name, told in FOREIGN.items() if _is_looked_up(name)]
    if found:
        return ProbeResult(Need.NEEDED, f"KV is found whatever {', '.join(found)} a request has")
    return ProbeResult(Need.NOT_NEEDED, "only what depends on tokens alone is looked up and stored")


def apply(_setting: Setting) -> str:
    """Let such requests neither load nor store through LMCache."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "get_num_new_matched_tokens", _missing)
    replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _storing_none)
    return "requests with any of these neither load nor store through LMCache"


def _missing(match: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int) -> Any:
    told = foreign(request)
    if told is None:
        return match(self, request, num_computed_tokens)
    _tell(told)
    # The adapter expects a spec of every request that resumes.
    from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec

    self.load_specs[request.request_id] = LoadSpec(num_computed_tokens, 0, False)
    return 0


def _tell(told: str) -> None:
    if told not in _told:
        _told.add(told)
        get_logger().warning(
            "pdkit-connector requests with %s neither load nor store KV through LMCache, whose "
            "keys are made of tokens alone: their KV is computed on each engine",
            told,
        )


def _storing_none(build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any) -> Any:
    metadata = build(self, scheduler_output)
    if metadata.requests:
        requests = self._unfinished_requests
        metadata.requests = [
            meta for meta in metadata.requests if foreign(requests.get(meta.req_id)) is None
        ]
    return metadata


def _is_looked_up(name: str) -> bool:
    client = LookupClient(CHUNK)
    impl = miniature(client=client)
    request = new_request(CHUNK, **{name: "probe"})
    before = set(_told)
    with quiet():
        found = impl.get_num_new_matched_tokens(request, 0)
    _told.intersection_update(before)
    return bool(found)


FIX = Fix(
    id="B16",
    title="KV is shared across LoRA adapters and cache salts",
    link="https://github.com/LMCache/LMCache/issues/2961",
    reason=(
        "LMCache's keys are made of the model's name and the tokens. Requests of another LoRA "
        "adapter get KV computed with other weights, requests with a cache salt are not kept "
        "apart, and all prompts given as embeddings look alike if their length is the same. With "
        "the fix, such requests bypass LMCache: their KV is not shared, and never wrong."
    ),
    probe=probe,
    apply=apply,
    # Around the fix of the metadata.
    rank=200,
)
