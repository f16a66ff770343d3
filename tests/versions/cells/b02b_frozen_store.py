"""B2b: a worker whose engine is frozen saves nothing and lives."""

from __future__ import annotations

from layerwise_engine import Worker, make_engine, request


def cell() -> None:
    engine = make_engine()
    engine.freeze(True)
    assert engine.is_frozen()
    worker = Worker(engine)
    for _ in range(2):
        worker.step(request("a", 16))
    assert engine.lookup(tokens=list(range(16)), lookup_id="look") == 0
    engine.freeze(False)
    worker.step(request("a", 16))
    assert engine.lookup(tokens=list(range(16)), lookup_id="look") == 16
