"""B4d: a preempted request that has a hit, of which vLLM loads nothing, ends the core."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import BLOCK, CHUNK, miniature, resumed_step
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import resumed_ids
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """Resume a request of which LMCache holds a chunk and vLLM a block."""
    from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec, RequestTracker

    if "preempted" not in inspect.signature(RequestTracker.update).parameters:
        return ProbeResult(Need.NOT_APPLICABLE, "resumed requests are not told apart")
    impl = miniature(client=object())
    try:
        resumed_step(impl, 2 * CHUNK, computed=BLOCK, spec=LoadSpec(BLOCK, CHUNK, False))
    except AssertionError:
        return ProbeResult(
            Need.NEEDED, "resuming what is found and not loaded is an AssertionError"
        )
    known = len(impl._request_trackers["probe"].token_ids)
    if known != BLOCK + 1:
        return ProbeResult(Need.NEEDED, f"of {BLOCK + 1} tokens, {known} count as computed")
    return ProbeResult(Need.NOT_NEEDED, "what is found and not loaded does not count as computed")


def apply(_setting: Setting) -> str:
    """Let what is not loaded count as not found."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _counting_what_is_loaded)
    return "only what vLLM has counts as computed"


def _counting_what_is_loaded(
    build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any
) -> Any:
    for req_id in resumed_ids(scheduler_output):
        spec = self.load_specs.get(req_id)
        request = self._unfinished_requests.get(req_id)
        if spec is not None and request is not None and not spec.can_load:
            spec.vllm_cached_tokens = request.num_computed_tokens
            spec.lmcache_cached_tokens = min(
                spec.lmcache_cached_tokens, request.num_computed_tokens
            )
    return build(self, scheduler_output)


FIX = Fix(
    id="B4d",
    title="a preempted request whose hit is not loaded ends the engine's core",
    link="none",
    reason=(
        "Some hits are not loaded: vLLM reads no cache for a request that asks for prompt log "
        "probabilities, and LMCache offers no hit below its min_retrieve_tokens. When such a "
        "request resumes after a preemption, the adapter asserts that what it found counts as "
        "computed."
    ),
    probe=probe,
    apply=apply,
)
