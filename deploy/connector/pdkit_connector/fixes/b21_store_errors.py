"""B21: an error in a plain store ends the engine's core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.layer_steps import idle_engine, replace_method, silent
from pdkit_connector.log import NAME, get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe


def probe(setting: Setting) -> ProbeResult:
    """Store with an engine that fails at once, and see who hears of it."""
    if setting.lmcache_value("use_layerwise") is True:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is on")
    engine = idle_engine()

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise MemoryError("probe")

    engine.stats_monitor = SimpleNamespace(on_store_request=fail)
    engine._is_passive = lambda: False
    try:
        with silent("lmcache.v1.cache_engine", NAME):
            engine.store([1], req_id="probe")
    except MemoryError:
        return ProbeResult(Need.NEEDED, "an error in a store is raised to vLLM")
    return ProbeResult(Need.NOT_NEEDED, "an error in a store stays in it")


def apply(_setting: Setting) -> str:
    """Drop a store that fails."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "store", _dropping)
    return "a store that fails is dropped"


def _dropping(store: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    try:
        store(self, *args, **kwargs)
    except Exception as exc:  # noqa: BLE001 - KV that is not stored is computed again
        get_logger().error(
            "pdkit-connector ERROR store of request %s dropped: %s",
            kwargs.get("req_id"),
            describe(exc),
        )


FIX = Fix(
    id="B21",
    title="an error in a plain store ends the engine's core",
    link="none",
    reason=(
        "An error while KV is stored, such as a copy that the mover refuses, is raised through the "
        "step and ends vLLM's core: all requests of the engine are lost, although the KV could be "
        "computed again. The fix logs the error and stores nothing of that request."
    ),
    probe=probe,
    apply=apply,
    # Last, around every other fix of the store.
    rank=300,
)
