"""B13: a lookup asks Redis for one chunk after the other, and so does a load."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from pdkit_connector.layer_steps import replace_method
from pdkit_connector.loop_probe import FakeRedis, idle_connector
from pdkit_connector.redis_reads import connectors, count_prefix, read_prefix, timeout_s
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.setting import Setting

# Chunks of one blocking read, which LMCache gives up after blocking_timeout_secs.
_SLICE = 16


def probe(_setting: Setting) -> ProbeResult:
    """Ask the connectors whether they take many keys at once."""
    if slow := [kind.__name__ for kind in connectors() if not _batches(kind)]:
        return ProbeResult(Need.NEEDED, f"{', '.join(slow)} asks for one chunk at a time")
    return ProbeResult(Need.NOT_NEEDED, "the connectors take many keys at once")


def apply(_setting: Setting) -> str:
    """Let lookups and loads go through pipelines."""
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    kind: Any
    for kind in connectors():
        if _batches(kind):
            continue
        kind.support_batched_contains = kind.support_batched_get = _supported
        kind.batched_contains = _contains
        kind._batched_async_contains = _async_contains
        kind.batched_get = _batched_get
    replace_method(RemoteBackend, "batched_get_blocking", _sliced)
    return "one round trip a lookup, batched loads"


def _batches(kind: type) -> bool:
    connector = idle_connector(kind, FakeRedis({}))
    return bool(connector.support_batched_contains() and connector.support_batched_get())


def _supported(_self: Any) -> bool:
    return True


def _contains(self: Any, keys: list[Any], _stop_at_first_absent: bool = True) -> Any:
    """Count the leading keys that exist, from a thread other than the loop's."""
    # Not a job of the connector's: a lookup need not wait for stores and loads to end.
    future = asyncio.run_coroutine_threadsafe(count_prefix(self, keys), self.loop)
    try:
        hits = future.result(timeout_s(getattr(self.local_cpu_backend, "config", None)))
    except BaseException:
        future.cancel()
        raise
    if _wants_flags():
        return [at < hits for at in range(len(keys))]
    return hits


def _wants_flags() -> bool:
    """Return whether this LMCache takes a flag for every key, as before 0.3.12."""
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    parameters = inspect.signature(RemoteConnector.batched_contains).parameters
    return "stop_after_first_not_exits" in parameters


async def _async_contains(self: Any, *, keys: list[Any], **_asked: Any) -> int:
    return await count_prefix(self, keys)


async def _read(self: Any, keys: list[Any]) -> list[Any]:
    found = await read_prefix(self, keys)
    return found + [None] * (len(keys) - len(found))


async def _batched_get(self: Any, keys: list[Any]) -> Any:
    from lmcache.v1.storage_backend.connector.redis_connector import Priorities

    return await self.pq_executor.submit_job(_read, self, keys, priority=Priorities.GET)


def _sliced(get: Callable[..., list[Any]], self: Any, keys: list[Any]) -> list[Any]:
    """Keep LMCache's limit on a blocking read to that of a few chunks, as it was of one."""
    if not _reads_redis(self.connection):
        return get(self, keys)
    found: list[Any] = []
    while len(found) < len(keys) and (not found or found[-1] is not None):
        found += get(self, keys[len(found) : len(found) + _SLICE])
    return found + [None] * (len(keys) - len(found))


def _reads_redis(connection: Any) -> bool:
    for wrapper in ("_connector", "real_connector"):
        connection = getattr(connection, wrapper, connection)
    return isinstance(connection, connectors())


FIX = Fix(
    id="B13",
    title="lookups and loads ask Redis for one chunk at a time",
    link="none",
    reason=(
        "LMCache waits for one EXISTS a chunk, one after the other, and loads each chunk with two "
        "GETs of its own, so a long prompt pays for hundreds of round trips before its first "
        "token. The fix sends a lookup as one pipeline and a load as a few."
    ),
    probe=probe,
    apply=apply,
)
