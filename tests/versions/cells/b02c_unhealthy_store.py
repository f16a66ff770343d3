"""B2c: a worker whose remote store is down saves nothing and lives."""

from __future__ import annotations

from layerwise_engine import Worker, make_engine, request


def cell() -> None:
    engine = make_engine()
    worker = Worker(engine)
    engine.is_healthy = lambda: False
    for _ in range(2):
        worker.step(request("a", 16))
    del engine.is_healthy
    assert engine.lookup(tokens=list(range(16)), lookup_id="look") == 0
    worker.step(request("a", 16))
    assert engine.lookup(tokens=list(range(16)), lookup_id="look") == 16
