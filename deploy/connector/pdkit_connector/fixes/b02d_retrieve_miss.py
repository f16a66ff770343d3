"""B2d: a layerwise retrieve that finds nothing reads a variable it never set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import Steps, probe_steps, replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(setting: Setting) -> ProbeResult:
    """Step a retriever that finds nothing."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    short, evidence = probe_steps("retrieve_layer")
    return ProbeResult(Need.NEEDED if short < 0 else Need.NOT_NEEDED, evidence)


def apply(_setting: Setting) -> str:
    """End a miss with a mask that says so."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "retrieve_layer", _completed)
    return "a miss ends in an empty mask"


def _completed(
    retrieve_layer: Callable[..., Steps], self: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Steps:
    import torch

    try:
        yield from retrieve_layer(self, tokens, *args, **kwargs)
    except UnboundLocalError as exc:
        if "mem_obj_consumer" not in str(exc):
            raise
        yield torch.zeros(len(tokens), dtype=torch.bool)


FIX = Fix(
    id="B2d",
    title="a layerwise retrieve ends the engine's core on a miss",
    link="https://github.com/LMCache/LMCache/issues/899",
    reason=(
        "When the keys are gone between lookup and load, retrieve_layer uses its consumer before "
        "it has created it: the UnboundLocalError ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
