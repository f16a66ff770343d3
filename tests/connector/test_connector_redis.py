"""The Redis path with its fixes (B7, B8, B9, B13): what the trials' cells leave out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.memory_management import TensorMemoryObj
from lmcache.v1.storage_backend.connector import redis_connector
from lmcache.v1.storage_backend.connector.redis_connector import (
    RedisClusterConnector,
    RedisConnector,
)
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager
from pdkit_connector import redis_reads
from pdkit_connector.fixes import (
    b07_hole,
    b08_loop_deadlock,
    b09_sentinel,
    b13_pipelined_lookup,
)
from pdkit_connector.loop_probe import FakeRedis, idle_connector, named_key, run_aside
from pdkit_connector.redis_reads import METADATA, PAYLOAD, read_prefix
from pdkit_connector.registry import FixState, apply_fix
from pdkit_connector.setting import Setting

from bench.redis_server import RedisServer, free_port
from tests.connector import fair_clock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import chunk, config, key, metadata, remote_backend
from redis_path import fill_of, on_loop, store

FIXES = {
    fix.id: fix
    for fix in (b07_hole.FIX, b08_loop_deadlock.FIX, b09_sentinel.FIX, b13_pipelined_lookup.FIX)
}
READS = (
    "_get",
    "exists_sync",
    "_batched_get_non_blocking",
    "_batched_async_contains",
    "batched_get",
    "support_batched_get",
    "batched_contains",
    "support_batched_contains",
)
KEYS = [key(number) for number in range(1, 6)]
LIMIT_S = 1


@pytest.fixture
def patched(restored):
    """Return apply_fix by id, with everything it replaces put back after the test."""
    restored(RedisConnector, *READS)
    restored(RedisClusterConnector, *READS)
    restored(redis_connector, "RedisSentinelConnector")
    restored(RemoteBackend, "contains")
    restored(AsyncPQExecutor, "submit_job", "shutdown")
    restored(LMCacheEngine, "retrieve_layer", "_process_tokens_internal")
    restored(StorageManager, "batched_get")
    return lambda fix_id: apply_fix(FIXES[fix_id], Setting())


@pytest.fixture
def all_patched(patched):
    """Apply the four fixes."""
    assert {patched(fix_id).state for fix_id in FIXES} == {FixState.APPLIED}


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Return a function that starts a redis-server with options."""
    with contextlib.ExitStack() as servers:
        yield lambda *options: servers.enter_context(
            RedisServer(tmp_path_factory.mktemp("redis"), *options)
        )


@pytest.fixture(scope="module")
def by_socket(serve):
    """The URL of a Redis behind a Unix socket."""
    return f"unix://{serve().socket}"


@pytest.fixture(scope="module")
def by_cluster(serve):
    """The URL of a cluster of one node that has all slots."""
    # The bus's default port, ten thousand above the other, can be past the last one.
    server = serve("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    client = redis.Redis(unix_socket_path=server.socket)
    client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    until = time.monotonic() + 20
    while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
        assert time.monotonic() < until, "no cluster"
        time.sleep(0.05)
    return f"redis-cluster://127.0.0.1:{server.port}"


@pytest.fixture
def backend(request, monkeypatch):
    """A remote backend of the URL whose fixture the test names, emptied."""
    monkeypatch.setenv("REDIS_PORT", "0")
    # Newer releases free what was never given back, which would hide a leak.
    monkeypatch.delattr(TensorMemoryObj, "__del__", raising=False)
    url = request.getfixturevalue(request.param)
    made = remote_backend(
        config(remote_url=url, max_local_cpu_size=0.001, blocking_timeout_secs=LIMIT_S), metadata()
    )
    on_loop(made, client_of(made).flushall())
    yield made
    made.close()
    made.loop.call_soon_threadsafe(made.loop.stop)


def client_of(backend):
    return redis_reads.client_of(backend.connection._connector)


def drop(backend, key, *parts):
    for part in parts:
        on_loop(backend, client_of(backend).delete(key.to_string() + part))


def room(backend):
    """Return how many chunks the pool still has room for."""
    first = chunk(backend)
    taken = [first]
    pool = backend.local_cpu_backend
    facts = first.get_shape(), first.get_dtype()
    while (
        more := pool.allocate(*facts, fmt=first.get_memory_format(), busy_loop=False)
    ) is not None:
        taken.append(more)
    for memory_obj in taken:
        memory_obj.ref_count_down()
    return len(taken)


both = pytest.mark.parametrize("backend", ["by_socket", "by_cluster"], indirect=True)


@pytest.mark.parametrize("fix_id", FIXES)
def test_a_fix_is_needed_before_it_is_applied_and_not_after(patched, fix_id):
    assert patched(fix_id).state is FixState.APPLIED
    assert patched(fix_id).state is FixState.NOT_NEEDED


@pytest.mark.parametrize("fix_id", FIXES)
def test_each_fix_works_without_the_others(patched, fix_id):
    for other in reversed(FIXES):
        if other != fix_id:
            assert patched(other).state is FixState.APPLIED
    assert patched(fix_id).state is FixState.APPLIED


@pytest.mark.usefixtures("all_patched")
@both
def test_every_read_ends_at_the_first_missing_chunk(backend):
    store(backend, KEYS)
    before = room(backend)
    drop(backend, KEYS[2], METADATA, PAYLOAD)
    assert backend.batched_contains(KEYS) == 2
    assert on_loop(backend, backend.batched_async_contains("a", KEYS)) == 2
    prefix = on_loop(backend, backend.batched_get_non_blocking("a", KEYS))
    padded = backend.batched_get_blocking(KEYS)
    assert [fill_of(found) for found in prefix] == [1, 2]
    assert [found and fill_of(found) for found in padded] == [1, 2, None, None, None]
    assert backend.get_blocking(KEYS[2]) is None
    last = backend.get_blocking(KEYS[4])
    assert fill_of(last) == 5
    redis_reads.release([*prefix, *padded, last])
    assert room(backend) == before


@pytest.mark.usefixtures("all_patched")
@both
def test_metadata_without_payload_is_a_miss_and_is_deleted(backend):
    store(backend, KEYS)
    before = room(backend)
    drop(backend, KEYS[1], PAYLOAD)
    assert backend.contains(KEYS[1])
    found = on_loop(backend, backend.batched_get_non_blocking("a", KEYS))
    assert [fill_of(memory_obj) for memory_obj in found] == [1]
    assert not backend.contains(KEYS[1])
    redis_reads.release(found)
    assert room(backend) == before


@pytest.mark.usefixtures("all_patched")
@pytest.mark.parametrize("backend", ["by_socket"], indirect=True)
@pytest.mark.parametrize("hole", [40, 33, 32, 31, 0])
def test_long_loads_are_read_in_slices_up_to_the_hole(backend, hole):
    keys = [key(number) for number in range(40)]
    store(backend, keys)
    before = room(backend)
    if hole < len(keys):
        drop(backend, keys[hole], PAYLOAD)
    found = backend.batched_get_blocking(keys)
    fills = [found and fill_of(found) for found in found]
    assert fills == [*range(1, hole + 1), *[None] * (40 - hole)]
    redis_reads.release(found)
    assert room(backend) == before


def test_other_stores_are_read_as_before():
    asked = []
    other = SimpleNamespace(connection=SimpleNamespace(_connector=object()))

    def get(_self, keys):
        asked.append(keys)
        return [None] * 40

    assert b13_pipelined_lookup._sliced(get, other, list(range(40))) == [None] * 40
    assert asked == [list(range(40))]


@pytest.mark.usefixtures("all_patched")
@pytest.mark.parametrize("backend", ["by_socket"], indirect=True)
@pytest.mark.parametrize("change", [lambda payload: payload[:-1], lambda payload: payload + b"x"])
def test_payload_of_another_length_is_a_miss(backend, change):
    store(backend, KEYS[:2])
    before = room(backend)
    name = KEYS[1].to_string() + PAYLOAD
    payload = on_loop(backend, client_of(backend).get(name))
    on_loop(backend, client_of(backend).set(name, change(payload)))
    found = backend.batched_get_blocking(KEYS[:2])
    assert [found and fill_of(found) for found in found] == [1, None]
    redis_reads.release(found)
    assert room(backend) == before


@pytest.mark.usefixtures("all_patched")
@pytest.mark.parametrize("backend", ["by_socket"], indirect=True)
def test_a_full_pool_is_a_miss_in_time_and_the_event_loop_goes_on(backend):
    store(backend, KEYS[:1])
    pool = backend.local_cpu_backend
    first = chunk(backend)
    taken = [first]
    facts = first.get_shape(), first.get_dtype()
    while (
        more := pool.allocate(*facts, fmt=first.get_memory_format(), busy_loop=False)
    ) is not None:
        taken.append(more)
    reading = asyncio.run_coroutine_threadsafe(
        backend.connection.batched_get(KEYS[:1]), backend.loop
    )
    begun = fair_clock.now()
    assert backend.contains(KEYS[0])
    assert fair_clock.now() - begun < LIMIT_S / 2, "the loop stood still"
    assert reading.result(60) == [None]
    redis_reads.release(taken)
    found = backend.get_blocking(KEYS[0])
    assert fill_of(found) == 1
    redis_reads.release([found])


@pytest.mark.usefixtures("all_patched")
@pytest.mark.parametrize("backend", ["by_socket"], indirect=True)
def test_an_abandoned_read_frees_its_memory(backend):
    store(backend, KEYS)
    before = room(backend)
    payload_asked = asyncio.Event()
    pipelined = redis_reads.pipelined

    async def hang_on_payloads(connector, command, names):
        if names[0].endswith(PAYLOAD):
            payload_asked.set()
            await asyncio.sleep(60)
        return await pipelined(connector, command, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_reads, "pipelined", hang_on_payloads)
        assert backend.batched_get_blocking(KEYS) == [None] * len(KEYS)
        assert payload_asked.is_set()
    on_loop(backend, asyncio.sleep(0.1))
    assert room(backend) == before
    redis_reads.release(found := backend.batched_get_blocking(KEYS))
    assert None not in found


def test_a_failed_read_frees_its_memory():
    released = []

    class Failing(FakeRedis):
        def get(self, name):
            if name.endswith(PAYLOAD):
                raise ConnectionError("gone")
            return super().get(name)

        def pipeline(self, **_options):
            return Failing(self.store)

    pool = SimpleNamespace(
        allocate=lambda *_a, **_k: SimpleNamespace(ref_count_down=lambda: released.append(1)),
        config=None,
    )
    connector = idle_connector(RedisConnector, Failing({f"a{METADATA}": b""}), pool)
    with pytest.MonkeyPatch.context() as patch:
        fact = SimpleNamespace(length=1, shapes=[], dtypes=[], fmt=None)
        patch.setattr(
            redis_connector, "RemoteMetadata", SimpleNamespace(deserialize=lambda _: fact)
        )
        with pytest.raises(ConnectionError):
            run_aside(read_prefix(connector, [named_key("a")]))
    assert released == [1]


def test_batches_are_limited_in_bytes_and_keep_the_order():
    big = redis_reads._BATCH_BYTES
    lengths = (1, big, 2, 3, big - 4, 2 * big)
    chunks = [
        redis_reads._Chunk(name, SimpleNamespace(length=length), None)
        for name, length in zip("abcdef", lengths, strict=True)
    ]
    names = [[chunk.name for chunk in batch] for batch in redis_reads._batches(chunks)]
    assert names == [["a"], ["b"], ["c", "d"], ["e"], ["f"]]
