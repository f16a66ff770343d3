"""B2e: a worker whose remote store went down between lookup and load lives, and loads nothing."""

from __future__ import annotations

from layerwise_engine import Worker, filled, make_engine, request


def cell() -> None:
    engine = make_engine()
    worker = Worker(engine)
    stored = filled(engine, 0, 16)
    worker.step(request("a", 16))
    engine.is_healthy = lambda: False
    load = request("b", 16, first_slot=32, saved=None, load=(0, 16))
    worker.step(load)
    assert not engine.gpu_connector.kv[:, 32:48].any()
    del engine.is_healthy
    worker.step(load)
    assert engine.gpu_connector.kv[:, 32:48].equal(stored)
