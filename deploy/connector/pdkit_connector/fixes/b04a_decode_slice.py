"""B4a: decoded tokens are taken from the wrong place, and their KV is never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import miniature, running_step
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import resumed_ids, running
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.request_view import RequestView, viewed

_TRACKED, _COMPUTED, _TOKENS = 5, 7, 8


def probe(_setting: Setting) -> ProbeResult:
    """Let a request run two tokens ahead of what the adapter knows of it, and see what it adds."""
    impl = miniature(client=object(), save_decode_cache=True)
    running_step(impl, _TOKENS, tracked=_TRACKED, computed=_COMPUTED)
    known = impl._request_trackers["probe"].token_ids
    if known == list(range(_TRACKED + 1)):
        return ProbeResult(Need.NOT_NEEDED, "a decode step adds the next token")
    return ProbeResult(Need.NEEDED, f"after tokens 0 to {_TRACKED - 1} come {known[_TRACKED:]}")


def apply(_setting: Setting) -> str:
    """Let no request be further than the adapter's own list of its tokens."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _from_the_tracked)
    return "tokens are added from where the adapter's list ends"


def _from_the_tracked(build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any) -> Any:
    views = _views(self, scheduler_output)
    if not views:
        return build(self, scheduler_output)
    with viewed(self._unfinished_requests, views):
        return build(self, scheduler_output)


def _views(impl: Any, scheduler_output: Any) -> dict[str, RequestView]:
    """Return a view of each request that is ahead of its tracker.

    One that resumes is left as it is: the adapter makes its list anew.
    """
    ahead = {
        req_id: RequestView(request, num_computed_tokens=len(tracker.token_ids))
        for req_id, request, tracker in running(impl, scheduler_output)
        if len(tracker.token_ids) < request.num_computed_tokens
    }
    for req_id in resumed_ids(scheduler_output) & ahead.keys():
        del ahead[req_id]
    return ahead


FIX = Fix(
    id="B4a",
    title="KV of decoded tokens is not stored, or stored under the wrong tokens",
    link="https://github.com/LMCache/LMCache/pull/2929",
    reason=(
        "vLLM counts a token as computed before its id is known. The adapter slices new ids from "
        "that count, so with asynchronous scheduling it finds none, and with speculative decoding "
        "it leaves some out: its list of tokens no longer matches the KV in the blocks."
    ),
    probe=probe,
    apply=apply,
)
