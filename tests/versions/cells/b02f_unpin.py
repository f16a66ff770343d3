"""B2f: what is pinned for a request is released once, at the latest when the request is over."""

from __future__ import annotations

from typing import Any

from layerwise_engine import Worker, make_engine, request


def cell() -> None:
    engine = make_engine()
    Worker(engine).step(request("a", 16))
    assert pins(engine) == {0}
    aborted_while_waiting(engine)
    consumer(engine)


def aborted_while_waiting(engine: Any) -> None:
    worker = Worker(engine)
    for req_id in ("waiting", "aborted"):
        assert engine.lookup(tokens=list(range(16)), lookup_id=req_id, pin=True) == 16
    assert pins(engine) == {2}
    worker.step(finished={"aborted"})
    assert pins(engine) == {1}, "one of two requests was aborted"
    worker.step(finished={"aborted"})
    assert pins(engine) == {1}, "its pins were released twice"
    worker.step(request("waiting", 16, first_slot=32, saved=None, load=(0, 16)))
    worker.step(finished={"waiting"})
    assert pins(engine) == {0}


def consumer(engine: Any) -> None:
    worker = Worker(engine, role="kv_consumer")
    assert engine.lookup(tokens=list(range(16)), lookup_id="b", pin=True) == 16
    worker.step(request("b", 16, first_slot=64, saved=None, load=(0, 16)))
    assert pins(engine) == {0}, "a consumer's pins outlived its load"


def pins(engine: Any) -> set[int]:
    """Return the pin counts of all that is in the CPU's cache."""
    backend = engine.storage_manager.storage_backends["LocalCPUBackend"]
    return {memory.metadata.pin_count for memory in backend.hot_cache.values()}
