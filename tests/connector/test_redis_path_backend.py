"""The Redis path as LMCache's plug-in, with LMCache's own objects and a real Redis."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pdkit_connector import engine_report, metrics, store_barrier, worker_socket
from pdkit_connector.connector import PatchedLMCacheConnector, require_plugins
from pdkit_connector.counters import COUNTERS, Counters
from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.settings import failures
from pdkit_connector.registry import Registry
from pdkit_connector.store_barrier import HoldUntilStored
from pdkit_connector.worker_socket import ask_now
from redis_backend import PAYLOAD, loaded, made, stored
from redis_servers import eventually
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, chunk, key, metadata, redis_path_config


@pytest.fixture
def backend(server):
    backend = made(redis_path_config(server.url))
    yield backend
    backend.close()


def test_losses_start_at_zero(server, monkeypatch):
    """Prometheus sees no growth in a count that appears with its first event."""
    counters = Counters()
    monkeypatch.setattr("pdkit_connector.redis_path.backend.COUNTERS", counters)
    monkeypatch.setattr("pdkit_connector.store_barrier.COUNTERS", counters)
    one = made(redis_path_config(server.url))
    HoldUntilStored(None)
    one.close()
    shown = {(name, *labels.values()) for name, labels, _ in counters.all()}
    assert shown >= {
        *(("chunks", "store", result) for result in ("stored", "failed", "late", "paused")),
        *(("chunks", "load", result) for result in ("loaded", "missing", "corrupt", "foreign")),
        ("replaced",),
        *(("barrier_waits", result) for result in ("stored", "late", "absent")),
    }
    losses = (count for name, _, count in counters.all() if name not in ("connects", "cpu_seconds"))
    assert set(losses) == {0}


def test_stored_chunks_are_found_and_loaded(backend):
    stored(backend, 1, 2, 3)
    keys = [key(number) for number in (1, 2, 3)]
    assert backend.batched_contains(keys) == 3
    assert loaded(backend.batched_get_blocking(keys)) == [1, 2, 3]
    assert loaded([backend.get_blocking(keys[1])]) == [2]
    assert backend.contains(keys[0]) and not backend.contains(key(9))


def test_a_prompt_is_loaded_up_to_its_first_missing_chunk(backend):
    stored(backend, 1, 3)
    keys = [key(number) for number in (1, 2, 3)]
    assert backend.batched_contains(keys) == 1
    assert loaded(backend.batched_get_blocking(keys)) == [1, None, None]


def test_a_load_without_blocking_returns_the_chunks_that_exist(backend):
    stored(backend, 1, 3)
    keys = [key(number) for number in (1, 2, 3)]
    asked = backend.batched_get_non_blocking("lookup", keys)
    assert loaded(asyncio.run(asked)) == [1]
    assert asyncio.run(backend.batched_async_contains("lookup", keys)) == 1


def test_a_load_frees_its_memory(backend):
    pool = backend.local_cpu_backend.memory_allocator
    stored(backend, *range(1, 40))
    for _ in range(5):
        loaded(backend.batched_get_blocking([key(number) for number in range(1, 40)]))
    assert pool.memcheck()
    assert largest(backend) > 0.9 * 0.01 * 2**30


def largest(backend) -> int:
    """Return the size of the largest object that the staging pool has room for, in bytes."""
    from lmcache.v1.memory_management import MemoryFormat

    low, high = 0, 2**24
    while high - low > 4096:
        middle = (low + high) // 2
        obj = backend.local_cpu_backend.allocate(
            torch.Size((middle,)), torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False
        )
        low, high = (middle, high) if obj else (low, middle)
        if obj:
            obj.ref_count_down()
    return low


def test_a_prompt_beyond_the_staging_pool_is_loaded_as_far_as_it_fits(backend, monkeypatch):
    count = 2 * int(0.01 * 2**30) // PAYLOAD
    for first in range(0, count, 100):
        stored(backend, *range(first, min(first + 100, count)))
    keys = [key(number) for number in range(count)]
    assert backend.batched_contains(keys) == count
    waits = mock.Mock()
    monkeypatch.setattr("pdkit_connector.redis_path.backend.time", SimpleNamespace(sleep=waits))
    values = loaded(backend.batched_get_blocking(keys))
    assert not waits.called, "nobody will give memory back: it is not waited for"
    held = values.index(None)
    assert 0 < held < count
    assert values[held:] == [None] * (count - held)
    assert COUNTERS.value("chunks", operation="load", result="no_memory") > 0


def test_a_load_waits_for_the_memory_of_stores(backend):
    """Stores that are under way give their memory back, in time for a load."""
    stored(backend, 1)
    pool, held = backend.local_cpu_backend, []
    from lmcache.v1.memory_management import MemoryFormat

    while obj := pool.allocate(
        torch.Size((PAYLOAD,)), torch.uint8, fmt=MemoryFormat.KV_2LTD, busy_loop=False
    ):
        held.append(obj)
    backend._storing.add("a store")

    def give_back() -> None:
        time.sleep(0.3)
        for obj in held:
            obj.ref_count_down()
        backend._storing.discard("a store")

    thread = threading.Thread(target=give_back)
    thread.start()
    try:
        assert loaded([backend.get_blocking(key(1))]) == [1]
    finally:
        thread.join()


def test_chunks_of_another_layout_or_namespace_are_not_found(server, backend):
    stored(backend, 1)
    for other in (
        made(redis_path_config(server.url), kv_shape=(LAYERS, 2, CHUNK, HEADS, 2 * HEAD_SIZE)),
        made(redis_path_config(server.url, extra={"pdkit.namespace": "pdkit:other:0"})),
    ):
        assert not other.contains(key(1))
        other.close()
    twin = made(redis_path_config(server.url))
    assert twin.contains(key(1))
    twin.close()


def test_ranks_of_a_model_with_shared_kv_read_what_the_first_stores(server):
    facts = {"use_mla": True, "world_size": 2, "kv_shape": (LAYERS, 1, CHUNK, 1, 8)}
    first, second = (
        made(redis_path_config(server.url), worker_id=rank, **facts) for rank in (0, 1)
    )
    of_first, of_second = (key(1, world_size=2, worker_id=rank) for rank in (0, 1))
    obj = chunk(first, 1)
    first.batched_submit_put_task([of_first], [obj])
    obj.ref_count_down()
    eventually(lambda: not store_barrier.under_way(), 30)
    assert first.contains(of_first) and second.contains(of_second)
    for each in (first, second):
        each.close()


def test_ranks_that_store_nothing_say_so(server, monkeypatch, request):
    """Of an MLA model ranks beyond the first have no store, and answers must not wait for them."""
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.token_database import ChunkedTokenDatabase

    name = f"mla-{os.getpid()}"
    monkeypatch.setenv(worker_socket.NAME_ENV, name)
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")
    settings = redis_path_config(server.url)
    for rank in (0, 1):
        shape = (LAYERS, 1, CHUNK, 1, 8)
        facts = metadata(worker_id=rank, world_size=2, use_mla=True, kv_shape=shape)
        database = ChunkedTokenDatabase(settings, facts)
        with mock.patch("gc.collect"):
            engine = LMCacheEngine(settings, facts, database, None, None, None)
            engine.post_init(kvcaches=[])
        request.addfinalizer(engine.close)
        assert (engine.storage_manager is None) == bool(rank)
        registered(SimpleNamespace(lmcache_engine=engine), monkeypatch)
    before = {each: COUNTERS.value("barrier_waits", result=each) for each in ("stored", "absent")}
    asyncio.run(answered())
    after = {each: COUNTERS.value("barrier_waits", result=each) for each in before}
    assert after == {"stored": before["stored"] + 1, "absent": before["absent"]}
    assert ask_now(name, 1, metrics.QUESTION, 5)


def test_a_worker_whose_lmcache_did_not_start_reports_that(monkeypatch):
    """It goes on where a fix was turned off by hand, and `check` is to name that fix."""
    name = f"broken-{os.getpid()}"
    monkeypatch.setenv(worker_socket.NAME_ENV, name)
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "1")
    monkeypatch.setattr("pdkit_connector.connector.kv_facts", lambda _: {})
    turned_off = SimpleNamespace(disabled=("B17",), check_kv_caches=lambda _: None)
    registered(SimpleNamespace(lmcache_engine=None), monkeypatch, turned_off)
    assert ask_now(name, 0, engine_report.QUESTION, 5)


def registered(adapter, monkeypatch, registry=None) -> None:
    """Do what the connector of rank 0 does once vLLM has made its KV tensors."""
    monkeypatch.setattr(LMCacheConnectorV1, "register_kv_caches", lambda *_: None)
    one = object.__new__(PatchedLMCacheConnector)
    one._registry, one._lmcache_engine = registry or Registry(()), adapter
    one._identity = {}
    one._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    one.register_kv_caches({})


async def answered() -> None:
    """Answer a request through the engine's middleware."""

    async def engine(scope, receive, send):
        await send({"type": "http.response.body", "body": b"answer"})

    async def send(message):
        pass

    await HoldUntilStored(engine)({"type": "http", "method": "POST"}, None, send)


def test_a_callback_hears_of_what_is_stored(backend):
    told = []
    obj = chunk(backend)
    backend.batched_submit_put_task([key(7)], [obj], on_complete_callback=told.append)
    obj.ref_count_down()
    eventually(lambda: told, 30)
    assert told == [key(7)]
    assert not backend.exists_in_put_tasks(key(7))


def test_chunks_are_removed_once(backend):
    stored(backend, 1, 2)
    assert backend.remove(key(1)) and not backend.remove(key(1))
    assert backend.batched_remove([key(1), key(2)]) == 1


def test_nothing_fails_without_redis(server):
    server.kill()
    backend = made(redis_path_config(server.url))
    assert backend is not None, "it may come"
    stored(backend, 1)
    assert backend.batched_contains([key(1)]) == 0
    assert loaded(backend.batched_get_blocking([key(1)])) == [None]
    assert not store_barrier.under_way()
    backend.close()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"pdkit.url": ""}, "pdkit.url"),
        ({"pdkit.url": "memcached://here"}, "memcached://"),
        ({"pdkit.namespace": None}, "pdkit.namespace"),
        ({"pdkit.laod_s": 1}, "pdkit.laod_s"),
        ({"pdkit.mac_key_file": "/nowhere/key"}, "pdkit.mac_key_file: /nowhere/key cannot be read"),
        ({"pdkit.mac_key_file": "/dev/null"}, "pdkit.mac_key_file: /dev/null is empty"),
    ],
)
def test_a_wrong_setting_stops_the_engine(server, extra, words):
    """LMCache only logs it, and would run on without a store."""
    failures.clear()
    settings = redis_path_config(server.url, extra=extra)
    assert made(settings) is None
    manager = SimpleNamespace(storage_backends={"LocalCPUBackend": None})
    engine = SimpleNamespace(config=settings, storage_manager=manager)
    with pytest.raises(ConnectorError, match=words):
        require_plugins(SimpleNamespace(lmcache_engine=engine))
    manager.storage_backends["pdkit"] = object()
    require_plugins(SimpleNamespace(lmcache_engine=engine))


def test_a_wrong_password_stops_the_engine(servers):
    failures.clear()
    server = servers.start("--requirepass", "the-right-one")
    url = server.url.replace("redis://", "redis://:{}@")
    assert made(redis_path_config(url.format("another-one"))) is None
    assert "refuses this engine" in failures[0]
    assert "another-one" not in failures[0]
    right = made(redis_path_config(url.format("the-right-one")))
    stored(right, 1)
    assert right.contains(key(1))
    right.close()
