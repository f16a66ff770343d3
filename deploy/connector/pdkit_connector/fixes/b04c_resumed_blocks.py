"""B4c: a preempted request keeps its old blocks in the adapter's list, and loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.adapter_miniature import (
    BLOCK,
    CHUNK,
    LOST_BLOCK,
    miniature,
    resumed_step,
)
from pdkit_connector.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.setting import Setting
from pdkit_connector.step_requests import resumed_ids


def probe(_setting: Setting) -> ProbeResult:
    """Resume a request on other blocks, and see from where it would be stored."""
    from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec

    try:
        metadata = resumed_step(
            miniature(client=object()),
            CHUNK,
            computed=0,
            scheduled=CHUNK,
            spec=LoadSpec(0, 0, False),
        )
    except AssertionError:
        return ProbeResult(Need.NOT_NEEDED, "requests that resume are told apart")
    slots = [request.slot_mapping[:1].tolist() for request in metadata.requests]
    if [LOST_BLOCK * BLOCK] in slots:
        return ProbeResult(Need.NEEDED, "a request that resumes keeps the blocks it lost")
    return ProbeResult(Need.NOT_NEEDED, "a request that resumes is not stored from blocks it lost")


def apply(_setting: Setting) -> str:
    """Let a request neither load nor store from its preemption on."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "get_num_new_matched_tokens", _missing)
    replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _storing_none)
    return "a request that resumes neither loads nor stores"


def _missing(match: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int) -> Any:
    if request.request_id in self._request_trackers:
        return 0
    return match(self, request, num_computed_tokens)


def _storing_none(build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any) -> Any:
    for req_id in resumed_ids(scheduler_output):
        self._request_trackers[req_id].skip_save = True
    metadata = build(self, scheduler_output)
    # A transfer to a named receiver is made whatever skip_save says.
    metadata.requests = [
        meta
        for meta in metadata.requests
        if meta.load_spec is not None or not self._request_trackers[meta.req_id].skip_save
    ]
    return metadata


FIX = Fix(
    id="B4c",
    title="a preempted request stores other requests' KV and uses KV that was never loaded",
    link="none",
    reason=(
        "Up to 0.3.9 the adapter adds the new blocks of a request that resumes to those it lost, "
        "and so stores what other requests wrote there under this request's tokens. It also offers "
        "vLLM what LMCache holds, but does not load it. Both give wrong output without an error."
    ),
    probe=probe,
    apply=apply,
)
