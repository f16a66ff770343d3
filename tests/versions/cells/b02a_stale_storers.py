"""B2a: a worker lives through steps that save nothing, and through a second end of a step."""

from __future__ import annotations

from layerwise_engine import LAYERS, Worker, make_engine, request


def cell() -> None:
    engine = make_engine()
    worker = Worker(engine)
    worker.step()
    worker.step(request("a", 16))
    # Attention that runs from a captured graph calls neither hook.
    worker.begin(request("a", 16))
    worker.end()
    worker.step(request("b", 16, first_slot=32, seed=1))
    worker.adapter.wait_for_save()
    worker.begin()
    worker.end()
    first_save_in_a_graph()
    for seed, req_id in enumerate("ab"):
        stored = engine.lookup(tokens=[seed * 1000 + i for i in range(16)], lookup_id="look")
        assert stored == 16, f"{stored} of 16 tokens of {req_id} stored, {LAYERS} layers each"


def first_save_in_a_graph() -> None:
    worker = Worker(make_engine())
    worker.begin(request("a", 16))
    worker.end()
