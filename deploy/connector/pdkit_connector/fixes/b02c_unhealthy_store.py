"""B2c: an unhealthy engine's layerwise store takes no step at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import Steps, probe_steps, replace_method, store_steps
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(setting: Setting) -> ProbeResult:
    """Step an unhealthy engine's storer and count."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    short, evidence = probe_steps("store_layer", healthy=False)
    return ProbeResult(Need.NEEDED if short < 0 else Need.NOT_NEEDED, evidence)


def apply(_setting: Setting) -> str:
    """Give an empty store all its steps."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "store_layer", _completed)
    return "an empty store takes all its steps"


def _completed(store_layer: Callable[..., Steps], self: Any, *args: Any, **kwargs: Any) -> Steps:
    empty = True
    for step in store_layer(self, *args, **kwargs):
        empty = False
        yield step
    if empty:
        yield from [None] * store_steps(self.num_layers)


FIX = Fix(
    id="B2c",
    title="an unhealthy engine's layerwise store ends the engine's core",
    link="none",
    reason=(
        "When the remote store is unhealthy, store_layer returns before its first yield while the "
        "vLLM adapter steps N + 1 times: the StopIteration ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
