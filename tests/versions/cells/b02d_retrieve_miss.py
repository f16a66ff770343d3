"""B2d: a worker that finds nothing of what the lookup found lives, and loads the next request."""

from __future__ import annotations

from layerwise_engine import Worker, filled, make_engine, request


def cell() -> None:
    engine = make_engine()
    worker = Worker(engine)
    stored = filled(engine, 0, 16)
    worker.step(request("a", 16))
    gone = request("b", 16, first_slot=32, saved=None, load=(0, 16), seed=1)
    here = request("c", 16, first_slot=64, saved=None, load=(0, 16))
    worker.step(gone, here)
    assert engine.gpu_connector.kv[:, 64:80].equal(stored), "the other request's KV did not come"
