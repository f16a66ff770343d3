"""B2f: what a lookup pinned stays pinned if its request never reaches a worker's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import idle_adapter
from pdkit_connector.in_engine.layer_steps import (
    ADAPTER,
    bind,
    idle_engine,
    probe_request,
    replace_method,
    silent,
)
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """Finish a request that no step had, and run a consumer's step; see whose pins are released."""
    with silent(ADAPTER):
        aborted, consumed = _released_of_aborted(), _released_of_consumer()
    if aborted and consumed:
        return ProbeResult(Need.NOT_NEEDED, "pins are released at the latest with their request")
    whose = "a request aborted before its first step" if consumed else "any consumer's request"
    return ProbeResult(Need.NEEDED, f"the pins of {whose} are not released")


def apply(_setting: Setting) -> str:
    """Release pins after a step, whatever the role, and when vLLM says that a request is over."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "wait_for_save", _after_step)
    replace_method(LMCacheConnectorV1Impl, "get_finished", _at_finish)
    return "pins are released after each step and for each finished request"


def _after_step(wait_for_save: Callable[[Any], None], self: Any) -> None:
    wait_for_save(self)
    engine = self.lmcache_engine
    if not (pins := getattr(engine, "lookup_pins", None)):
        return
    for request in self._parent._get_connector_metadata().requests:
        # lookup_unpin forgets what it released, so nothing is released twice.
        if request.req_id in pins:
            engine.lookup_unpin(request.req_id)


def _at_finish(
    get_finished: Callable[[Any, set[str]], Any], self: Any, finished_req_ids: set[str]
) -> Any:
    if self.lmcache_engine is not None:
        for req_id in finished_req_ids:
            self.lmcache_engine.lookup_unpin(req_id)
    return get_finished(self, finished_req_ids)


def _released_of_aborted() -> bool:
    adapter, released = _watched("kv_both")
    bind(adapter)
    adapter.wait_for_save()
    adapter.get_finished({"probe"})
    return "probe" in released


def _released_of_consumer() -> bool:
    adapter, released = _watched("kv_consumer")
    bind(adapter, probe_request(load=True))
    adapter.wait_for_save()
    return "probe" in released


def _watched(role: str) -> tuple[Any, list[str]]:
    """Return an adapter on an engine with pins of request "probe", and who is released."""
    released: list[str] = []
    engine = idle_engine()
    engine.lookup_pins = {"probe": {}}
    engine.lookup_unpin = released.append
    adapter = idle_adapter(engine, role=role)
    adapter.layerwise_storers = []
    return adapter, released


FIX = Fix(
    id="B2f",
    title="pins of requests that never reach a step are never released",
    link="none",
    reason=(
        "A lookup pins what it finds, and the adapter releases it in the request's first step. A "
        "request that is aborted while it waits never gets there, and up to 0.4.2 the adapter "
        "leaves out all requests of a consumer: their chunks stay pinned, and cannot be evicted, "
        "for five minutes (a monitor's timeout) or forever."
    ),
    probe=probe,
    apply=apply,
)
