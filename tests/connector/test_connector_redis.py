"""LMCache's own Redis client with its fixes (B7, B8): what the trials' cells leave out."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.memory_management import TensorMemoryObj
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager
from pdkit_connector.fixes import b07_hole, b08_loop_deadlock
from pdkit_connector.registry import FixState, Setting, apply_fix

from bench.redis_server import RedisServer
from tests.connector import fair_clock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import chunk, config, key, metadata, remote_backend
from redis_path import fill_of, on_loop, store

FIXES = {fix.id: fix for fix in (b07_hole.FIX, b08_loop_deadlock.FIX)}
KEYS = [key(number) for number in range(1, 6)]
LIMIT_S = 1
METADATA, PAYLOAD = "metadata", "kv_bytes"


@pytest.fixture
def patched(restored):
    """Return apply_fix by id, with everything it replaces put back after the test."""
    restored(RedisConnector, "get", "exists", "close")
    restored(RemoteBackend, "contains", "batched_get_blocking")
    restored(LMCacheEngine, "retrieve_layer", "_process_tokens_internal")
    restored(StorageManager, "batched_get")
    return lambda fix_id: apply_fix(FIXES[fix_id], Setting())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def backend(server, patched, monkeypatch):
    """A remote backend with the fixes, and with an empty Redis."""
    assert {patched(fix_id).state for fix_id in FIXES} == {FixState.APPLIED}
    monkeypatch.setenv("REDIS_PORT", str(server.port))
    # Newer releases free what was never given back, which would hide a leak.
    monkeypatch.delattr(TensorMemoryObj, "__del__", raising=False)
    made = remote_backend(
        config(max_local_cpu_size=0.001, blocking_timeout_secs=LIMIT_S), metadata()
    )
    on_loop(made, client_of(made).flushall())
    yield made
    made.close()
    made.loop.call_soon_threadsafe(made.loop.stop)


def client_of(backend):
    return backend.connection._connector.connection


def drop(backend, key, *parts):
    for part in parts:
        on_loop(backend, client_of(backend).delete(key.to_string() + part))


def all_memory(backend):
    """Take all staging memory that is left, in chunks."""
    first = chunk(backend)
    taken, pool = [first], backend.local_cpu_backend
    facts = first.get_shape(), first.get_dtype()
    while (
        more := pool.allocate(*facts, fmt=first.get_memory_format(), busy_loop=False)
    ) is not None:
        taken.append(more)
    return taken


def room(backend):
    """Return how many chunks the pool still has room for."""
    taken = all_memory(backend)
    release(taken)
    return len(taken)


def release(memory_objs):
    for memory_obj in memory_objs:
        if memory_obj is not None:
            memory_obj.ref_count_down()


def fills(found):
    return [memory_obj and fill_of(memory_obj) for memory_obj in found]


@pytest.mark.parametrize("fix_id", FIXES)
def test_a_fix_is_needed_before_it_is_applied_and_not_after(patched, fix_id):
    assert patched(fix_id).state is FixState.APPLIED
    assert patched(fix_id).state is FixState.NOT_NEEDED


@pytest.mark.parametrize("lost", [(METADATA, PAYLOAD), (PAYLOAD,)])
def test_a_read_ends_at_the_first_missing_chunk(backend, lost):
    store(backend, KEYS)
    before = room(backend)
    drop(backend, KEYS[2], *lost)
    found = backend.batched_get_blocking(KEYS)
    assert fills(found) == [1, 2, None, None, None]
    assert backend.get_blocking(KEYS[2]) is None
    last = backend.get_blocking(KEYS[4])
    assert fill_of(last) == 5
    release([*found, last])
    assert room(backend) == before
    # Metadata without a payload is gone, too, so that what is computed again is stored.
    assert backend.batched_contains(KEYS) == 2


@pytest.mark.parametrize("change", [lambda payload: payload[:-1], lambda payload: payload + b"x"])
def test_payload_of_another_length_is_a_miss(backend, change):
    store(backend, KEYS[:2])
    before = room(backend)
    name = KEYS[1].to_string() + PAYLOAD
    payload = on_loop(backend, client_of(backend).get(name))
    on_loop(backend, client_of(backend).set(name, change(payload)))
    found = backend.batched_get_blocking(KEYS[:2])
    assert fills(found) == [1, None]
    release(found)
    assert room(backend) == before


def test_a_full_pool_is_a_miss_in_time_and_the_event_loop_goes_on(backend):
    store(backend, KEYS[:1])
    taken = all_memory(backend)
    reading = asyncio.run_coroutine_threadsafe(backend.connection.get(KEYS[0]), backend.loop)
    begun = fair_clock.now()
    assert backend.contains(KEYS[0])
    assert fair_clock.now() - begun < LIMIT_S / 2, "the loop stood still"
    assert reading.result(60) is None
    release(taken)
    found = backend.get_blocking(KEYS[0])
    assert fill_of(found) == 1
    release([found])


def test_a_read_waits_for_memory_that_is_freed_in_time(backend):
    store(backend, KEYS[:1])
    taken = all_memory(backend)
    pool, asked = backend.local_cpu_backend, threading.Event()
    allocate = pool.allocate

    def noting(*args, **options):
        asked.set()
        return allocate(*args, **options)

    pool.allocate = noting
    reading = asyncio.run_coroutine_threadsafe(backend.connection.get(KEYS[0]), backend.loop)
    assert asked.wait(60)
    release(taken)
    found = reading.result(60)
    assert found is not None
    release([found])


def test_reads_and_lookups_that_are_given_up_free_their_memory_and_end_no_worker(backend):
    """More of them than LMCache has workers; then it reads, looks up and stores again."""
    store(backend, KEYS)
    before = room(backend)
    client, hanging = client_of(backend), []

    async def hang(*_args):
        hanging.append(1)
        await asyncio.sleep(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "mget", hang)
        patch.setattr(client, "exists", hang)
        for _ in range(3):
            assert backend.batched_get_blocking(KEYS) == [None] * len(KEYS)
            assert backend.contains(KEYS[0]) is False
    assert len(hanging) == 6, "one chunk is asked for, then none behind it"
    assert room(backend) == before
    found = backend.batched_get_blocking(KEYS)
    assert fills(found) == [1, 2, 3, 4, 5]
    release(found)
    assert backend.contains(KEYS[0]) is True
    store(backend, [key(9)])
    assert backend.contains(key(9)) is True


@pytest.mark.parametrize("broken", ["mget", "exists"])
def test_an_error_of_redis_is_a_miss(backend, broken):
    store(backend, KEYS[:1])
    before = room(backend)

    async def fail(*_args):
        raise ConnectionError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_of(backend), broken, fail)
        if broken == "mget":
            assert backend.batched_get_blocking(KEYS[:1]) == [None]
        else:
            assert backend.contains(KEYS[0]) is False
    assert room(backend) == before


def test_without_a_connection_nothing_is_found(backend):
    connection, backend.connection = backend.connection, None
    assert backend.contains(KEYS[0]) is False
    assert backend.batched_get_blocking(KEYS[:2]) == [None, None]
    backend.connection = connection


def test_ranks_of_an_mla_model_look_the_first_ones_keys_up(backend):
    store(backend, KEYS[:1])
    backend._mla_worker_id_as0_mode = True
    theirs = SimpleNamespace(with_new_worker_id=lambda rank: KEYS[rank])
    assert backend.contains(theirs) is True
    backend._mla_worker_id_as0_mode = False


def test_closing_ends(backend):
    """Upstream waits on the loop for what the loop would have to do, and never ends."""
    on_loop(backend, backend.connection.close())
