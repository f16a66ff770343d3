"""B4b: a preempted request that is a full hit ends the engine's core."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import CHUNK, miniature, resumed_step
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import resumed_ids
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.request_view import RequestView, viewed


def probe(_setting: Setting) -> ProbeResult:
    """Resume a request of which LMCache holds every token."""
    from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec, RequestTracker

    if "preempted" not in inspect.signature(RequestTracker.update).parameters:
        return ProbeResult(Need.NOT_APPLICABLE, "resumed requests are not told apart")
    try:
        resumed_step(
            miniature(client=object()), CHUNK, computed=CHUNK - 1, spec=LoadSpec(0, CHUNK, True)
        )
    except AssertionError as exc:
        return ProbeResult(Need.NEEDED, f"resuming a full hit raises AssertionError: {exc}")
    return ProbeResult(Need.NOT_NEEDED, "a full hit can be resumed")


def apply(_setting: Setting) -> str:
    """Show the adapter the count that it expects of such a request."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _with_the_last_token)
    return "the token that vLLM computes again counts as loaded"


def _with_the_last_token(build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any) -> Any:
    views = {
        req_id: RequestView(request, num_computed_tokens=request.num_computed_tokens + 1)
        for req_id in resumed_ids(scheduler_output)
        if (request := self._unfinished_requests.get(req_id)) is not None
        and _is_full_hit(request, self.load_specs.get(req_id))
    }
    with viewed(self._unfinished_requests, views):
        return build(self, scheduler_output)


def _is_full_hit(request: Any, spec: Any) -> bool:
    """Tell whether LMCache gives every token and vLLM computes the last one for its logits."""
    return (
        spec is not None
        and spec.can_load
        and spec.vllm_cached_tokens
        < spec.lmcache_cached_tokens
        == len(request.all_token_ids)
        == request.num_computed_tokens + 1
    )


FIX = Fix(
    id="B4b",
    title="a preempted request that is a full hit ends the engine's core",
    link="https://github.com/LMCache/LMCache/pull/2929",
    reason=(
        "vLLM computes the last token of a full hit again, for its logits. When such a request "
        "resumes after a preemption, the adapter asserts that all tokens count as computed, and "
        "the AssertionError ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
