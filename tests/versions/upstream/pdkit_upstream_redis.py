"""A pytest plug-in: completes upstream's stand-ins for Redis, and ends pytest when it is done.

LMCache asks Redis for one key at a time, so the clients that its tests put in place of Redis's own
have no pipelines; the fixes use them (B13). Both sides get them, and LMCache itself calls none. As
from Redis, values come back as bytes. The cluster's client is put in place on both sides alike: by
upstream's way it is only where nobody imported LMCache's module before the first test. With the
fixes, the stand-in for an asynchronous Sentinel hands out clients that are to be awaited, as a real
one does: that LMCache does not await them is a bug (B9), to which upstream's stand-in is fitted.
Old releases' tests give a connector a bare allocator for LMCache's backend: it learns of the
backend's `busy_loop`, with which the fixes ask not to wait.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

REDIS_CONNECTOR = "lmcache.v1.storage_backend.connector.redis_connector"


class _Pipeline:
    """Commands that a stand-in's own methods answer one by one."""

    def __init__(self, client: Any) -> None:
        self._client, self._answers = client, list[Any]()

    def get(self, name: str) -> None:
        self._answers.append(self._client.get(name))

    def exists(self, name: str) -> None:
        self._answers.append(self._client.exists(name))

    async def execute(self) -> list[Any]:
        found = [await each if inspect.isawaitable(each) else each for each in self._answers]
        return [bytes(each) if isinstance(each, memoryview) else each for each in found]


def _pipeline(self: Any, *, transaction: bool = True) -> _Pipeline:
    return _Pipeline(self)


def _awaited(kind: Any) -> Any:
    """Return a Sentinel whose clients are to be awaited, with the stores of those of `kind`."""

    class Sentinel(kind):  # type: ignore[misc]
        def master_for(self, *args: Any, **kwargs: Any) -> Any:
            return _with_store_of(super().master_for(*args, **kwargs))

        def slave_for(self, *args: Any, **kwargs: Any) -> Any:
            return _with_store_of(super().slave_for(*args, **kwargs))

    return Sentinel


def _with_store_of(client: Any) -> Any:
    import redis.asyncio

    awaited: Any = redis.asyncio.Redis()
    awaited.store = client.store
    return awaited


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests() -> None:
    """Let a bare allocator be asked as LMCache's backend is."""
    from lmcache.v1 import memory_management

    kind: Any = getattr(memory_management, "PinMemoryAllocator", None)
    if kind is None or "busy_loop" in inspect.signature(kind.allocate).parameters:
        return
    allocate = kind.allocate

    def allocate_at_once(self: Any, *args: Any, busy_loop: bool = False, **kwargs: Any) -> Any:
        return allocate(self, *args, **kwargs)

    kind.allocate = allocate_at_once


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Complete the stand-ins, which upstream's fixtures have put in place by now."""
    import redis.asyncio

    if connectors := sys.modules.get(REDIS_CONNECTOR):
        connectors.RedisCluster = redis.asyncio.cluster.RedisCluster  # type: ignore[attr-defined]

    for client in (redis.Redis, redis.asyncio.Redis, redis.asyncio.cluster.RedisCluster):
        kind: Any = client
        if isinstance(kind, type) and not hasattr(kind, "pipeline"):
            kind.pipeline = _pipeline
    sentinel: Any = redis.asyncio.Sentinel
    if not os.environ.get("PDKIT_UPSTREAM_CONNECTOR") or sentinel.__module__.startswith("redis."):
        return (yield)
    redis.asyncio.Sentinel = _awaited(sentinel)
    try:
        return (yield)
    finally:
        redis.asyncio.Sentinel = sentinel


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process, outcomes being logged: threads of a test that failed may run for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
