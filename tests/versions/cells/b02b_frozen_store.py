"""B2b: the vLLM adapter steps a frozen engine's storer once a layer and once more."""

from __future__ import annotations

from pdkit_connector.layer_steps import idle_engine
from trial import NotHere

LAYERS = 3


def cell() -> None:
    engine = idle_engine(frozen=True)
    if not hasattr(type(engine), "is_frozen"):
        raise NotHere("no freeze mode")
    storer = engine.store_layer([1] * 8, sync=True, req_id="a")
    for _ in range(LAYERS + 1):
        next(storer)
