"""B9: the Sentinel connector never awaits its client: every key exists, and nothing is stored."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from pdkit_connector.loop_probe import FakeRedis, idle_connector, named_key, run_aside
from pdkit_connector.registry import Fix, Need, ProbeResult, describe
from pdkit_connector.setting import Setting


def probe(_setting: Setting) -> ProbeResult:
    """Ask a Sentinel connector over an empty store whether it has a key."""
    from lmcache.v1.storage_backend.connector import redis_connector

    connector = idle_connector(redis_connector.RedisSentinelConnector, FakeRedis({}))
    try:
        if not run_aside(connector.exists(named_key("absent"))):
            return ProbeResult(Need.NOT_NEEDED, "an absent key is absent")
    except Exception as exc:  # noqa: BLE001 - a connector that cannot ask cannot serve either
        return ProbeResult(Need.NEEDED, f"exists raises {describe(exc)}")
    return ProbeResult(Need.NEEDED, "an absent key exists")


def apply(_setting: Setting) -> str:
    """Give Sentinel the plain connector's reads and writes, over its own two clients."""
    from lmcache.v1.storage_backend.connector import redis_connector
    from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

    unawaited: Any = redis_connector.RedisSentinelConnector
    awaited: Any = redis_connector.RedisConnector

    class RedisSentinelConnector(awaited, unawaited):  # type: ignore[misc]
        """The plain connector's methods over the clients that LMCache's own constructor makes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            unawaited.__init__(self, *args, **kwargs)
            given = inspect.signature(unawaited.__init__).bind(self, *args, **kwargs)
            self.loop = given.arguments["loop"]
            self.max_connections = 150
            self.sem = asyncio.Semaphore(self.max_connections)
            self.connection = _Routed(self.master, self.slave)
            self.pq_executor = AsyncPQExecutor(self.loop)

    redis_connector.RedisSentinelConnector = RedisSentinelConnector
    return "awaited, by the plain connector's methods"


class _Routed:
    """One client of two: what reads goes to the replicas, as in LMCache, the rest to the master."""

    def __init__(self, master: Any, replica: Any) -> None:
        self._master, self._replica = master, replica
        self.get, self.exists, self.pipeline = replica.get, replica.exists, replica.pipeline
        self.set, self.delete = master.set, master.delete

    async def close(self) -> None:
        """Close both."""
        await self._master.close()
        await self._replica.close()


FIX = Fix(
    id="B9",
    title="Redis Sentinel is never awaited",
    link="https://github.com/LMCache/LMCache/pull/5162",
    reason=(
        "The Sentinel connector calls an asynchronous client without awaiting it: every lookup "
        "is a hit, every load fails, and nothing is ever stored."
    ),
    probe=probe,
    apply=apply,
)
