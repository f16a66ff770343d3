"""A pytest plug-in: completes upstream's stand-ins for Redis, and ends pytest when it is done.

LMCache asks Redis for one key at a time, so the clients that its tests put in place of Redis's own
have no MGET, by which B8 reads. Both sides get it, and LMCache itself never calls it. As from
Redis, values come back as bytes. The cluster's client is put in place on both sides alike: by
upstream's way it is only where nobody imported LMCache's module before the first test. Old
releases' tests give a connector a bare allocator for LMCache's backend: it learns of the backend's
`busy_loop`, with which the fixes ask not to wait.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

REDIS_CONNECTOR = "lmcache.v1.storage_backend.connector.redis_connector"


async def _mget(self: Any, *names: str) -> list[Any]:
    found = [self.get(name) for name in names]
    values = [await each if inspect.isawaitable(each) else each for each in found]
    return [bytes(each) if isinstance(each, memoryview) else each for each in values]


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
    kind: Any = redis.asyncio.Redis
    if isinstance(kind, type) and not hasattr(kind, "mget"):
        kind.mget = _mget
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process, outcomes being logged: threads of a test that failed may run for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
