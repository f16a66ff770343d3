"""LMCache's engine and storage manager over the trial's Redis, as far as a load needs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import redis
from lmcache_objects import CHUNK, chunk
from pdkit_connector.in_engine.layer_steps import idle_engine

TIMEOUT_S = 60


def client() -> redis.Redis:
    """Return a client of the trial's Redis, emptied."""
    client = redis.Redis(port=int(os.environ["REDIS_PORT"]))
    client.flushall()
    return client


@contextlib.contextmanager
def gate(redis: redis.Redis) -> Iterator[Callable[[], object]]:
    """Let Redis take no writes until what this gives is called, or the block ends."""
    redis.client_pause(3_600_000, all=False)
    try:
        yield redis.client_unpause
    finally:
        redis.client_unpause()


def on_loop(backend: Any, coroutine: Any) -> Any:
    """Run a coroutine on the backend's loop, as the storage manager does."""
    return asyncio.run_coroutine_threadsafe(coroutine, backend.loop).result(TIMEOUT_S)


def store(backend: Any, keys: list[Any]) -> None:
    """Store a chunk for each key, filled with the key's number from one on."""
    for fill, key in enumerate(keys, 1):
        on_loop(backend, backend.connection.put(key, chunk(backend, fill)))


def fill_of(memory_obj: Any) -> int:
    """Return what a chunk was filled with."""
    values = set(memory_obj.tensor.flatten().tolist())
    assert len(values) == 1, f"a chunk holds {values}"
    return int(values.pop())


def manager(backend: Any) -> Any:
    """Return a storage manager of a staging pool and a remote backend."""
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    made: Any = object.__new__(StorageManager)
    pool = backend.local_cpu_backend
    made.storage_backends = OrderedDict(LocalCPUBackend=pool, RemoteBackend=backend)
    made.non_allocator_backends = ["RemoteBackend"]
    made.config, made.loop = backend.config, backend.loop
    made.allocator_backend = pool
    made._freeze, made._freeze_lock = False, threading.RLock()
    made._bypassed_backends, made._bypass_lock = set(), threading.RLock()
    return made


def engine(backend: Any, keys: list[Any]) -> Any:
    """Return an engine whose prompt is one chunk a key."""
    made = idle_engine()
    made.storage_manager = manager(backend)
    infos = [(at * CHUNK, (at + 1) * CHUNK, key) for at, key in enumerate(keys)]
    made.token_database = SimpleNamespace(process_tokens=lambda **_kwargs: iter(infos))
    made.lookup_cache, made.lookup_pins = {}, {}
    made.remove_after_retrieve = False
    return made
