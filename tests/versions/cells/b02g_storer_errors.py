"""B2g: a worker lives through a store that fails, and through more layers than LMCache knows."""

from __future__ import annotations

from typing import Any

from layerwise_engine import LAYERS, Worker, filled, make_engine, request
from layerwise_sequences import run_sequences


def cell() -> None:
    for layer in range(LAYERS):
        store_that_fails(layer)
    put_that_fails()
    more_layers()
    run_sequences()


def store_that_fails(layer: int) -> None:
    """The mover raises at one layer; other requests of the step and later steps are stored."""
    engine = make_engine()
    worker = Worker(engine)
    engine.gpu_connector.fails_at = (layer, 0)
    worker.step(request("a", 16), request("b", 16, first_slot=32, seed=1))
    assert found(engine, 1) == 16, "the other request was not stored"
    engine.gpu_connector.fails_at = None
    worker.step(request("c", 16, first_slot=64, seed=2))
    assert found(engine, 2) == 16


def put_that_fails() -> None:
    """The storage manager raises: nothing of the request may be found."""
    engine = make_engine()
    worker = Worker(engine)
    put = engine.storage_manager.batched_put

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise MemoryError("full")

    engine.storage_manager.batched_put = full
    worker.step(request("a", 16))
    engine.storage_manager.batched_put = put
    assert found(engine, 0) == 0
    worker.step(request("a", 16))
    assert found(engine, 0) == 16


def more_layers() -> None:
    """A draft model's layers call the same hooks after the model's own."""
    engine = make_engine()
    worker = Worker(engine)
    stored = filled(engine, 0, 16)
    worker.begin(request("a", 16))
    for index in range(LAYERS + 2):
        worker.layer(index)
    worker.end()
    assert found(engine, 0) == 16
    worker.begin(request("b", 16, first_slot=32, saved=None, load=(0, 16)))
    for index in range(LAYERS + 2):
        worker.layer(index)
    assert not worker.end()
    assert engine.gpu_connector.kv[:, 32:48].equal(stored)


def found(engine: Any, seed: int) -> int:
    tokens = [seed * 1000 + i for i in range(16)]
    return int(engine.lookup(tokens=tokens, lookup_id="look"))
