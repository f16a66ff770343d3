"""B18: blocks that a layerwise load leaves unwritten are reported to vLLM, and no others."""

from __future__ import annotations

from typing import Any

from layerwise_engine import BLOCK, CHUNK, LAYERS, Worker, filled, make_engine, request


def cell() -> None:
    for layer in range(LAYERS):
        evicted(layer)
    whole()
    nothing_left()


def evicted(layer: int) -> None:
    """The second chunk loses one layer between lookup and load."""
    engine = make_engine()
    worker = Worker(engine)
    filled(engine, 0, 3 * CHUNK)
    worker.step(request("a", 3 * CHUNK))
    forget(engine, layer, 1)
    first = 64
    failed = worker.step(request("b", 3 * CHUNK, first_slot=first, saved=None, load=(0, 3 * CHUNK)))
    unwritten = {
        slot // BLOCK
        for slot in range(first, first + 3 * CHUNK)
        if not engine.gpu_connector.kv[:, slot].any(dim=-1).all()
    }
    assert unwritten, "the trial lost nothing"
    assert unwritten <= failed, f"blocks {sorted(unwritten - failed)} are unwritten and unreported"
    assert failed <= {slot // BLOCK for slot in range(first, first + 3 * CHUNK)}
    assert not worker.step(), "a failure is reported once"


def whole() -> None:
    """A load that is whole reports nothing, also where vLLM has the first chunk."""
    engine = make_engine()
    worker = Worker(engine)
    filled(engine, 0, 2 * CHUNK)
    worker.step(request("a", 2 * CHUNK))
    for held in (0, CHUNK):
        load = request("b", 2 * CHUNK, first_slot=64, saved=None, load=(held, 2 * CHUNK))
        assert not worker.step(load)


def nothing_left() -> None:
    """All keys are gone; blocks of the chunk that vLLM has are not reported."""
    worker = Worker(make_engine())
    load = request("b", 2 * CHUNK, first_slot=64, saved=None, load=(CHUNK, 2 * CHUNK))
    failed = worker.step(load)
    blocks = {slot // BLOCK for slot in range(64 + CHUNK, 64 + 2 * CHUNK)}
    assert failed == blocks, f"blocks {sorted(failed)} reported, {sorted(blocks)} unwritten"


def forget(engine: Any, layer: int, chunk: int) -> None:
    """Evict one chunk's KV of one layer from the CPU's cache."""
    cache = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
    hashes = list(dict.fromkeys(key.chunk_hash for key in cache))
    for key in [k for k in cache if k.layer_id == layer and k.chunk_hash == hashes[chunk]]:
        del cache[key]
