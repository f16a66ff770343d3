"""KV larger than staging memory, through LMCache's own engine, the Redis path and a real Redis."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector import store_barrier
from pdkit_connector.counters import COUNTERS
from pdkit_connector.fixes import b23_staging
from pdkit_connector.in_engine import staging
from pdkit_connector.registry import Setting
from redis_servers import eventually

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, metadata, redis_path_config

CHUNKS, STAGED = 20, 4
TOKENS = list(range(CHUNKS * CHUNK))
SLOTS = torch.arange(len(TOKENS))
WIDTH = HEADS * HEAD_SIZE
ALIGNED = 4096  # what the allocator makes of a chunk
LOST = ("no_room", "failed", "late", "paused")


class Mover:
    """A plain mover between a tensor of slots and memory objects."""

    def __init__(self) -> None:
        self.kv = torch.rand(2, LAYERS, len(TOKENS), WIDTH).to(torch.bfloat16)

    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, WIDTH])

    def batched_from_gpu(self, objects, starts, ends, **kwargs):
        for memory, start, end in zip(objects, starts, ends, strict=True):
            memory.tensor.copy_(self.kv[:, :, kwargs["slot_mapping"][start:end]])

    def batched_to_gpu(self, objects, starts, ends, **kwargs):
        for memory, start, end in zip(objects, starts, ends, strict=True):
            self.kv[:, :, kwargs["slot_mapping"][start:end]] = memory.tensor


@pytest.fixture
def fixed(restored):
    """Apply the fix until the test's end."""
    engine = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngine
    manager = importlib.import_module("lmcache.v1.storage_backend.storage_manager").StorageManager
    restored(engine, "store", "retrieve")
    restored(manager, "allocate", "batched_allocate")
    b23_staging.apply(Setting())


@pytest.fixture
def make_engine(server, request, fixed):
    """Return what makes an engine whose staging memory holds STAGED chunks."""
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.token_database import ChunkedTokenDatabase

    def make(**limits):
        settings = redis_path_config(server.url, extra={f"pdkit.{k}": v for k, v in limits.items()})
        settings.max_local_cpu_size = STAGED * ALIGNED / 2**30
        facts = metadata()
        database = ChunkedTokenDatabase(settings, facts)
        with mock.patch("gc.collect"):
            made = LMCacheEngine(settings, facts, database, Mover(), None, None)
            made.post_init(kvcaches=[])
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def lost():
    """Return what says how many chunks were not stored in this test, by why."""
    before = {why: count(why) for why in LOST}
    return lambda: {why: n for why in LOST if (n := count(why) - before[why])}


def count(result: str, operation: str = "store") -> int:
    return int(COUNTERS.value("chunks", operation=operation, result=result))


def stored(engine) -> None:
    engine.store(TOKENS, slot_mapping=SLOTS, offset=0, req_id="store")


def all_ended() -> None:
    eventually(lambda: not store_barrier.under_way(), 60)


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_prompt_five_times_the_staging_memory_is_moved_whole(make_engine, lost):
    producer, consumer = make_engine(), make_engine()
    stored(producer)
    all_ended()
    assert lost() == {}
    assert consumer.lookup(tokens=TOKENS, lookup_id="load") == len(TOKENS)
    got = consumer.retrieve(TOKENS, slot_mapping=SLOTS, req_id="load")
    assert int(got.sum()) == len(TOKENS)
    assert torch.equal(consumer.gpu_connector.kv, producer.gpu_connector.kv)


def test_only_what_fits_the_staging_memory_is_moved_without_the_fix(make_engine, monkeypatch):
    monkeypatch.setattr(staging, "piece_tokens", lambda _engine: len(TOKENS))
    producer = make_engine()
    stored(producer)
    all_ended()
    assert producer.lookup(tokens=TOKENS, lookup_id="load") == STAGED * CHUNK


def test_only_tokens_in_the_mask_are_moved(make_engine):
    engine = make_engine()
    stored(engine)
    all_ended()
    sent = engine.gpu_connector.kv.clone()
    engine.gpu_connector.kv.zero_()
    mask = torch.ones(len(TOKENS), dtype=torch.bool)
    mask[: 3 * CHUNK] = False
    got = engine.retrieve(TOKENS, mask, slot_mapping=SLOTS, req_id="load")
    assert torch.equal(got, mask)
    assert not engine.gpu_connector.kv[:, :, : 3 * CHUNK].any()
    assert torch.equal(engine.gpu_connector.kv[:, :, 3 * CHUNK :], sent[:, :, 3 * CHUNK :])


def test_a_load_ends_at_the_first_piece_that_falls_short(make_engine, server):
    engine = make_engine()
    stored(engine)
    all_ended()
    keys = [key for *_, key in engine.token_database.process_tokens(tokens=TOKENS)]
    assert engine.storage_manager.storage_backends["pdkit"].remove(keys[5])
    before = count("loaded", "load")
    got = engine.retrieve(TOKENS, slot_mapping=SLOTS, req_id="load")
    assert int(got.sum()) == 5 * CHUNK and bool(got[: 5 * CHUNK].all())
    assert count("loaded", "load") - before == 5, "what comes behind is not asked for"


def test_a_store_waits_while_redis_does_not_take_more(make_engine, server, lost):
    engine = make_engine()
    stored_before = count("stored")
    server.stop_answering()
    thread = in_thread(lambda: stored(engine))
    eventually(lambda: len(store_barrier.under_way()) == STAGED, 30)
    assert thread.is_alive(), "it waits for room"
    server.answer_again()
    thread.join(60)
    all_ended()
    assert (count("stored") - stored_before, lost()) == (CHUNKS, {})


def test_a_load_uses_the_memory_that_stores_free(make_engine, server):
    """Staging memory is full of chunks that wait to be stored, and a load needs some of it."""
    engine = make_engine()
    stored(engine)
    all_ended()
    server.stop_answering()
    piece = TOKENS[: STAGED * CHUNK]
    others = [token + len(TOKENS) for token in piece]
    in_thread(lambda: engine.store(others, slot_mapping=SLOTS, offset=0, req_id="store")).join(60)
    assert len(store_barrier.under_way()) == STAGED
    found = []
    load = in_thread(
        lambda: found.append(engine.retrieve(TOKENS, slot_mapping=SLOTS, req_id="load"))
    )
    server.answer_again()
    load.join(60)
    assert int(found[0].sum()) == len(TOKENS)


def layers(engine):
    """Take memory for the layers of a chunk, as a layerwise store does."""
    return engine.storage_manager.batched_allocate(
        torch.Size((ALIGNED,)), torch.uint8, batch_size=LAYERS, busy_loop=False
    )


def give_back(memory):
    for one in memory:
        one.ref_count_down()


def test_layers_of_a_chunk_wait_for_room(make_engine, server, monkeypatch, lost):
    engine = make_engine()
    server.stop_answering()
    piece = TOKENS[: STAGED * CHUNK]
    in_thread(lambda: engine.store(piece, slot_mapping=SLOTS, offset=0, req_id="store")).join(60)
    assert len(store_barrier.under_way()) == STAGED
    pool, found = engine.storage_manager.allocator_backend, []
    asked = mock.Mock(wraps=pool.batched_allocate)
    monkeypatch.setattr(pool, "batched_allocate", asked)
    thread = in_thread(lambda: found.append(layers(engine)))
    eventually(lambda: asked.call_count > 1, 30)
    server.answer_again()
    thread.join(60)
    assert len(found[0]) == LAYERS and lost() == {}
    give_back(found[0])


def test_layers_without_room_are_counted(make_engine, lost):
    engine, held = make_engine(), []
    while memory := layers(engine):
        held += memory
    assert held and lost() == {"no_room": 1}
    give_back(held)


def test_every_chunk_is_counted_if_redis_hangs(make_engine, server, lost):
    engine = make_engine(silent_s=0.3, store_s=30)
    stored_before = count("stored")
    server.stop_answering()
    in_thread(lambda: stored(engine)).join(60)
    all_ended()
    assert sum(lost().values()) == CHUNKS
    assert count("stored") == stored_before
    server.answer_again()


def test_a_store_that_never_ends_is_waited_for_once(make_engine, monkeypatch, lost):
    """What hangs forever holds a step up to its deadline, not each step that follows."""
    monkeypatch.setenv(store_barrier.DEADLINE_ENV, "0.2")
    monkeypatch.setattr(staging, "_given_up", set())
    engine = make_engine()
    pool, held = engine.storage_manager.storage_backends["LocalCPUBackend"], []
    while memory := pool.allocate(
        torch.Size((ALIGNED,)), torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False
    ):
        held.append(memory)
    token = store_barrier.begin()
    try:
        stored(engine)
        assert lost() == {"no_room": CHUNKS}
        # The module's own clock: threads of LMCache sleep, too.
        clock = mock.Mock(wraps=time)
        monkeypatch.setattr(staging, "time", clock)
        stored(engine)
        assert not clock.sleep.called and lost() == {"no_room": 2 * CHUNKS}
    finally:
        store_barrier.end(token)


def test_closing_ends_a_store_that_waits(make_engine, server):
    """An engine that is stopped does not wait for a Redis that hangs."""
    engine = make_engine(silent_s=2, store_s=30)
    server.stop_answering()
    thread = in_thread(lambda: stored(engine))
    eventually(lambda: len(store_barrier.under_way()) == STAGED, 30)
    engine.storage_manager.storage_backends["pdkit"].close()
    thread.join(60)
    assert not thread.is_alive() and not store_barrier.under_way()
    server.answer_again()
