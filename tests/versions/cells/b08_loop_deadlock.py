"""B8: neither a full staging pool nor a stalled Redis may stop lookups, loads or the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lmcache_objects import chunk, config, key, metadata, remote_backend
from redis import Redis
from redis_path import client, fill_of, gate, store

LIMIT_S = 1
PATIENCE_S = 60
WORKERS = 4
SLACK = 3

# A loop that asks for memory so often between two turns waits for what only its turns bring.
TRIES = 5

# 256 KiB: a pool that a few dozen chunks fill.
POOL_GIB = 2**-12


# The client's own limits of 5 s would lose a store on a busy machine.
NO_OTHER_LIMITS = f"?socket_timeout={PATIENCE_S}&socket_connect_timeout={PATIENCE_S}"


def cell() -> None:
    settings = config(max_local_cpu_size=POOL_GIB, blocking_timeout_secs=LIMIT_S)
    settings.remote_url += NO_OTHER_LIMITS
    backend = remote_backend(settings, metadata())
    outlive_a_full_pool(backend)
    outlive_a_stall(backend)
    within(backend.close)


def outlive_a_full_pool(backend: Any) -> None:
    """Fill the pool with stores that Redis holds up until a load has found no memory."""
    redis = client()
    store(backend, [key(1)])
    pool = backend.local_cpu_backend
    first = chunk(backend, 2)
    taken = [first]
    while (more := allocate_like(pool, first)) is not None:
        taken.append(more)
    tries = Tries(backend)
    with gate(redis):
        backend.batched_submit_put_task([key(at) for at in range(2, 2 + len(taken))], taken)
        for memory_obj in taken:
            memory_obj.ref_count_down()
        loading = begin(lambda: backend.get_blocking(key(1)))
        eventually(lambda: tries.in_vain or loading.done(), "a load asks for no memory")
    eventually(lambda: tries.turning() and loading.done(), "a load never ended")
    if (found := loading.result()) is not None:
        assert fill_of(found) == 1
        found.ref_count_down()
    wanted = 2 * (1 + len(taken))
    eventually(lambda: tries.turning() and redis.dbsize() == wanted, "stores never ended")
    soon(lambda: backend.contains(key(1)) is True, "lookups do not come back after a full pool")


def allocate_like(pool: Any, first: Any) -> Any:
    shape, dtype = first.get_shape(), first.get_dtype()
    return pool.allocate(shape, dtype, fmt=first.get_memory_format(), busy_loop=False)


class Tries:
    """Counts how often memory is asked for in vain, and by the event loop between two turns."""

    def __init__(self, backend: Any) -> None:
        self.in_vain = 0
        self._since_a_turn = 0
        self._allocator = backend.local_cpu_backend.memory_allocator
        self._allocate, self._allocator.allocate = self._allocator.allocate, self._count
        asyncio.run_coroutine_threadsafe(self._turns(), backend.loop).result(PATIENCE_S)

    async def _turns(self) -> None:
        loop = asyncio.get_running_loop()
        self._loops_thread = threading.get_ident()

        def turn() -> None:
            self._since_a_turn = 0
            loop.call_later(0.01, turn)

        turn()

    def _count(self, *arguments: Any, **options: Any) -> Any:
        found = self._allocate(*arguments, **options)
        if found is None:
            self._since_a_turn += threading.get_ident() == self._loops_thread
            self.in_vain += 1
        return found

    def turning(self) -> bool:
        """Return True; fail where the loop does nothing but ask for memory."""
        assert self._since_a_turn < TRIES, "the loop waits for memory that stores on it hold"
        return True


def outlive_a_stall(backend: Any) -> None:
    """Look up and load while Redis stalls, longer than the limit, and again afterwards.

    Waits that have no limit take as long as the stall; on a busy machine, others take a multiple.
    """
    redis = client()
    store(backend, [key(1)])
    with stalled(redis):
        # What as many waits of the limit take on this machine, one after another.
        waiting = begin(lambda: seconds_of_waits(WORKERS + 1))
        began = time.monotonic()
        for _ in range(WORKERS):
            assert within(lambda: backend.get_blocking(key(1))) is None
        assert within(lambda: backend.contains(key(1))) is False, "a stalled lookup was a hit"
        took = time.monotonic() - began
    assert took < SLACK * waiting.result()
    # On a busy machine one may take longer than the limit.
    found = soon(lambda: backend.get_blocking(key(1)), "loads do not come back after a stall")
    assert fill_of(found) == 1
    soon(lambda: backend.contains(key(1)) is True, "lookups do not come back after a stall")


@contextmanager
def stalled(redis: Redis) -> Iterator[None]:
    """Let Redis do nothing until the block ends."""
    server = redis.info("server")["process_id"]
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


def seconds_of_waits(count: int) -> float:
    began = time.monotonic()
    for _ in range(count):
        time.sleep(LIMIT_S)
    return time.monotonic() - began


def begin(work: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work)


def within(work: Callable[[], Any]) -> Any:
    """Return what `work` returns; raise where it takes longer than PATIENCE_S."""
    return begin(work).result(PATIENCE_S)


def soon(work: Callable[[], Any], otherwise: str) -> Any:
    """Return what `work` returns once that is something, as `eventually`."""
    found: list[Any] = []
    eventually(lambda: found.append(within(work)) or found[-1], otherwise)
    return found[-1]


def eventually(told: Callable[[], object], otherwise: str) -> None:
    """Wait until `told` is true; fail after PATIENCE_S."""
    ends = time.monotonic() + PATIENCE_S
    while not told():
        assert time.monotonic() < ends, otherwise
        time.sleep(0.01)
