"""B8: neither a full staging pool nor a stalled Redis may stop lookups, loads or the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lmcache_objects import chunk, config, key, metadata, remote_backend
from redis_path import client, fill_of, store

LIMIT_S = 1
PATIENCE_S = 12
WORKERS = 4

# 256 KiB: a pool that a few dozen chunks fill.
POOL_GIB = 2**-12


def cell() -> None:
    settings = config(max_local_cpu_size=POOL_GIB, blocking_timeout_secs=LIMIT_S)
    backend = remote_backend(settings, metadata())
    outlive_a_full_pool(backend)
    outlive_a_stall(backend)
    within(backend.close)


def outlive_a_full_pool(backend: Any) -> None:
    """Fill the pool with stores that Redis holds up, and load a chunk meanwhile."""
    redis = client()
    store(backend, [key(1)])
    pool = backend.local_cpu_backend
    first = chunk(backend, 2)
    taken = [first]
    while (more := allocate_like(pool, first)) is not None:
        taken.append(more)
    redis.client_pause(LIMIT_S * 300, all=False)
    backend.batched_submit_put_task([key(at) for at in range(2, 2 + len(taken))], taken)
    for memory_obj in taken:
        memory_obj.ref_count_down()
    begun = time.monotonic()
    found = within(lambda: backend.get_blocking(key(1)))
    if found is not None:
        assert fill_of(found) == 1
        found.ref_count_down()
    while time.monotonic() - begun < PATIENCE_S and redis.dbsize() < 2 * (1 + len(taken)):
        time.sleep(0.05)
    assert redis.dbsize() == 2 * (1 + len(taken)), "stores never ended"
    assert within(lambda: backend.contains(key(1))) is True


def allocate_like(pool: Any, first: Any) -> Any:
    shape, dtype = first.get_shape(), first.get_dtype()
    return pool.allocate(shape, dtype, fmt=first.get_memory_format(), busy_loop=False)


def outlive_a_stall(backend: Any) -> None:
    """Look up and load while Redis stalls, longer than the limit, and again afterwards."""
    redis = client()
    store(backend, [key(1)])
    redis.client_pause(1000 * LIMIT_S * (WORKERS + 2))
    stalled = time.monotonic()
    for _ in range(WORKERS):
        assert within(lambda: backend.get_blocking(key(1))) is None
    assert within(lambda: backend.contains(key(1))) is False, "a stalled lookup was a hit"
    assert time.monotonic() - stalled < LIMIT_S * (WORKERS + 2)
    redis.ping()
    found = within(lambda: backend.get_blocking(key(1)))
    assert found is not None, "loads do not come back after a stall"
    assert fill_of(found) == 1
    assert within(lambda: backend.contains(key(1))) is True


def within(work: Callable[[], Any]) -> Any:
    """Return what `work` returns; raise where it takes longer than PATIENCE_S."""
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert answer, f"no answer within {PATIENCE_S} s"
    return answer[0]
