"""B2e: an unhealthy engine's layerwise retrieve takes one step instead of N + 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import Steps, probe_steps, replace_method, retrieve_steps
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(setting: Setting) -> ProbeResult:
    """Step an unhealthy engine's retriever, and count against a healthy one's."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    short, evidence = probe_steps("retrieve_layer", healthy=False)
    # A healthy engine's miss can be short too: that is B2d, and unrelated to health.
    short_anyway, _ = probe_steps("retrieve_layer")
    return ProbeResult(Need.NEEDED if short < short_anyway else Need.NOT_NEEDED, evidence)


def apply(_setting: Setting) -> str:
    """Hold the mask back until the last step."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "retrieve_layer", _completed)
    return "the mask comes at the last step"


def _completed(retrieve_layer: Callable[..., Steps], self: Any, *args: Any, **kwargs: Any) -> Steps:
    steps = retrieve_layer(self, *args, **kwargs)
    first = next(steps)
    try:
        second = next(steps)
    except StopIteration:
        # Only the unhealthy path ends here: what it gave is the mask.
        yield from [None] * (retrieve_steps(self.num_layers) - 1)
        yield first
        return
    yield first
    yield second
    yield from steps


FIX = Fix(
    id="B2e",
    title="an unhealthy engine's layerwise retrieve ends the engine's core",
    link="none",
    reason=(
        "When the remote store is unhealthy, retrieve_layer yields its mask at once and ends while "
        "the vLLM adapter steps N + 2 times: the StopIteration ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
