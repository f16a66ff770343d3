"""Running a coroutine in miniature, for probes, also inside a process that has a running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any


def run_aside(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine` on a loop of its own, in this thread, and return its result."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
        asyncio._set_running_loop(outer)


class Ready:
    """An awaitable that is ready at once and does not mind never being awaited."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        return self.value
        yield


class FakeRedis:
    """A Redis client that answers from a dictionary."""

    def __init__(self, store: dict[str, bytes]) -> None:
        self.store = store
        self._queued: list[Any] = []

    def get(self, name: str) -> Ready:
        """Return the value of `name`, also to the pipeline."""
        return self._answer(self.store.get(name))

    def exists(self, name: str) -> Ready:
        """Return whether `name` is there, also to the pipeline."""
        return self._answer(int(name in self.store))

    def delete(self, name: str) -> Ready:
        """Delete `name`."""
        return self._answer(self.store.pop(name, None))

    def pipeline(self, **_options: Any) -> FakeRedis:
        """Return a client that remembers its answers."""
        return FakeRedis(self.store)

    def execute(self, **_options: Any) -> Ready:
        """Return the answers so far."""
        return Ready(self._queued)

    def _answer(self, value: Any) -> Ready:
        self._queued.append(value)
        return Ready(value)


def idle_connector(kind: type, client: FakeRedis, pool: Any = None) -> Any:
    """Return a Redis connector of LMCache without a connection; its jobs run at once."""
    connector: Any = object.__new__(kind)
    connector.sem = asyncio.Semaphore(8)
    connector.connection = connector.master = connector.slave = client
    if "Cluster" in kind.__name__:
        connector.cluster = client
        del connector.connection
    connector.local_cpu_backend = pool
    connector.pq_executor = SimpleNamespace(submit_job=_run_job)
    connector.loop = None
    return connector


async def _run_job(job: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("priority", None)
    return await job(*args, **kwargs)


def named_key(name: str) -> Any:
    """Return a cache key that is only a name, equal to itself alone, split into itself by layer."""
    from lmcache.utils import CacheEngineKey

    class NamedKey(CacheEngineKey):  # type: ignore[misc]
        __eq__ = object.__eq__
        __hash__ = object.__hash__

        def __init__(self) -> None:
            pass

        def to_string(self) -> str:
            return name

        def split_layers(self, num_layers: int) -> list[NamedKey]:
            return [self] * num_layers

    return NamedKey()
