"""B2b: a frozen layerwise store is one step short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import Steps, probe_steps, replace_method, store_steps
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(setting: Setting) -> ProbeResult:
    """Step a frozen engine's storer and count."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    short, evidence = probe_steps("store_layer", frozen=True)
    return ProbeResult(Need.NEEDED if short < 0 else Need.NOT_NEEDED, evidence)


def apply(_setting: Setting) -> str:
    """Add the missing step."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "store_layer", _completed)
    return "the last step added"


def _completed(store_layer: Callable[..., Steps], self: Any, *args: Any, **kwargs: Any) -> Steps:
    taken = 0
    for step in store_layer(self, *args, **kwargs):
        taken += 1
        yield step
    if taken == store_steps(self.num_layers) - 1:
        yield


FIX = Fix(
    id="B2b",
    title="a frozen layerwise store is one step short",
    link="https://github.com/LMCache/LMCache/issues/4927",
    reason=(
        "In freeze mode store_layer yields N times while the vLLM adapter steps N + 1 times: the "
        "StopIteration ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
