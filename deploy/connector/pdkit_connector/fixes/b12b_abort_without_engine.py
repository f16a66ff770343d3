"""B12b: an aborted request ends the engine's core, since the scheduler's half has no engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.adapter_miniature import LookupClient, miniature, quiet
from pdkit_connector.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.request_view import RequestView
from pdkit_connector.setting import Setting


def probe(_setting: Setting) -> ProbeResult:
    """Abort a request where there is a lookup client and no engine, as in every scheduler."""
    from vllm.v1.request import RequestStatus

    request = SimpleNamespace(request_id="probe", status=RequestStatus.FINISHED_ABORTED)
    try:
        with quiet():
            miniature(client=LookupClient()).request_finished(request, [])
    except AssertionError:
        return ProbeResult(Need.NEEDED, "an abort without an engine is an AssertionError")
    return ProbeResult(Need.NOT_NEEDED, "an abort needs no engine")


def apply(_setting: Setting) -> str:
    """Cancel the lookup, which is all that there is to cancel."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "request_finished", _without_engine)
    return "an abort cancels what there is"


def _without_engine(finish: Callable[..., Any], self: Any, request: Any, block_ids: Any) -> Any:
    from vllm.v1.request import RequestStatus

    if self.lmcache_engine is None and request.status == RequestStatus.FINISHED_ABORTED:
        if self.async_loading and self.lookup_client is not None:
            self.lookup_client.cancel_lookup(request.request_id)
        request = RequestView(request, status=None)
    return finish(self, request, block_ids)


FIX = Fix(
    id="B12b",
    title="an aborted request ends the engine's core",
    link="https://github.com/LMCache/LMCache/issues/3337",
    reason=(
        "When a request is aborted, as when its client goes away, the adapter's scheduler half "
        "asserts that it has an engine, which only the workers have: the AssertionError ends the "
        "engine's core."
    ),
    probe=probe,
    apply=apply,
)
