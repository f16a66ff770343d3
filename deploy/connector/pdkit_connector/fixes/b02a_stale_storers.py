"""B2a: layerwise storers outlive their step."""

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
    run_layers,
    silent,
)
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe


def probe(setting: Setting) -> ProbeResult:
    """End a step before the first save, then end one that saved twice."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    for told, ends in (("a step without a save", _first), ("a step that is ended twice", _twice)):
        try:
            with silent(ADAPTER):
                ends(idle_adapter(idle_engine()))
        except (AttributeError, StopIteration) as exc:
            return ProbeResult(Need.NEEDED, f"{told} raises {describe(exc)}")
    return ProbeResult(Need.NOT_NEEDED, "storers end with their step")


def apply(_setting: Setting) -> str:
    """Give the adapter its list of storers before the first step, and empty it after each."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "wait_for_save", _cleared)
    return "storers are dropped at the end of their step"


def _cleared(wait_for_save: Callable[[Any], None], self: Any) -> None:
    self.__dict__.setdefault("layerwise_storers", [])
    try:
        wait_for_save(self)
    finally:
        self.layerwise_storers = []


def _first(adapter: Any) -> None:
    bind(adapter)
    adapter.wait_for_save()


def _twice(adapter: Any) -> None:
    bind(adapter, probe_request())
    run_layers(adapter)
    adapter.wait_for_save()
    adapter.wait_for_save()


FIX = Fix(
    id="B2a",
    title="layerwise storers outlive their step",
    link="https://github.com/LMCache/LMCache/pull/2613",
    reason=(
        "The vLLM adapter keeps its layerwise storers in a list that only the next save empties: a "
        "step that saves nothing steps the finished storers of an earlier one, and the "
        "StopIteration ends the engine's core. In 0.3.9 the list does not even exist before the "
        "first save, which is an AttributeError."
    ),
    probe=probe,
    apply=apply,
)
