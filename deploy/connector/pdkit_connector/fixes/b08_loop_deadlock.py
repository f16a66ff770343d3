"""B8: LMCache's event loop waits for memory, or for itself, and everything waits for the loop."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import replace_method, was_replaced, what_runs
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe

# A chunk is these two keys, which Redis can evict apart.
_METADATA, _PAYLOAD = "metadata", "kv_bytes"
_POLL_S = 0.02


def probe(_setting: Setting) -> ProbeResult:
    """See whether a read sleeps on the event loop, and whether a lookup waits without a limit."""
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    endless = []
    if not was_replaced(RedisConnector.get, _get) and _sleeps(RedisConnector._get):
        endless.append("a read sleeps on the loop for memory")
    if _waits_forever(RemoteBackend.contains):
        endless.append("a lookup has no limit")
    if endless:
        return ProbeResult(Need.NEEDED, "; ".join(endless))
    return ProbeResult(Need.NOT_NEEDED, "nothing waits on the event loop, or without a limit")


def apply(_setting: Setting) -> str:
    """Read in the waiter's own task, one chunk after the other, and give up in time."""
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    replace_method(RedisConnector, "get", _get)
    replace_method(RedisConnector, "exists", _exists)
    replace_method(RedisConnector, "close", _close)
    replace_method(RemoteBackend, "contains", _contains)
    replace_method(RemoteBackend, "batched_get_blocking", _one_by_one)
    return "reads and lookups are bounded, and no worker runs them"


async def _get(_replaced: Callable[..., Any], self: Any, key: Any) -> Any:
    """Do RedisConnector.get: a chunk that is not whole, or finds no memory in time, is a miss.

    Nothing is awaited once memory is taken, so that a read that is given up holds none. LMCache's
    four workers do not run it: one whose waiter gave up would end.
    """
    from lmcache.v1.storage_backend.connector import redis_connector

    name = key.to_string()
    async with self.sem:
        packed, payload = await self.connection.mget(name + _METADATA, name + _PAYLOAD)
        if packed is not None and payload is None:
            # Lookups must stop finding it, or what is computed again would never be stored.
            await self.connection.delete(name + _METADATA)
    if packed is None or payload is None:
        return None
    facts = redis_connector.RemoteMetadata.deserialize(memoryview(packed))
    memory_obj = await _allocated(self.local_cpu_backend, facts)
    if memory_obj is None:
        return None
    view = memoryview(memory_obj.byte_array)
    view = view if view.format == "B" else view.cast("B")
    if not memory_obj.get_size() <= len(payload) == facts.length <= len(view):
        memory_obj.ref_count_down()
        return None
    view[: facts.length] = payload
    return memory_obj


async def _allocated(pool: Any, facts: Any) -> Any:
    """Return memory for a chunk; None if there is none within half of the reader's own limit."""
    clock = asyncio.get_running_loop().time
    until = clock() + pool.config.blocking_timeout_secs / 2
    while True:
        found = pool.allocate(facts.shapes, facts.dtypes, facts.fmt, busy_loop=False)
        if found is not None:
            return found
        if clock() >= until:
            get_logger().warning("pdkit-connector WARNING no staging memory for a chunk: a miss")
            return None
        await asyncio.sleep(_POLL_S)


async def _exists(_replaced: Callable[..., Any], self: Any, key: Any) -> bool:
    """Do RedisConnector.exists without one of its workers."""
    return bool(await self._exists(key))


def _contains(_replaced: Callable[..., bool], self: Any, key: Any, _pin: bool = False) -> bool:
    """Do RemoteBackend.contains: no answer within LMCache's own limit is a miss."""
    if self.connection is None:
        return False
    if self._mla_worker_id_as0_mode:
        key = key.with_new_worker_id(0)
    future = asyncio.run_coroutine_threadsafe(self.connection.exists(key), self.loop)
    try:
        return bool(future.result(self.config.blocking_timeout_secs))
    except Exception as exc:  # noqa: BLE001 - any failure to find out is a miss
        future.cancel()
        get_logger().warning("pdkit-connector WARNING lookup failed: %s", describe(exc))
        return False


def _one_by_one(_replaced: Callable[..., Any], self: Any, keys: list[Any]) -> list[Any]:
    """Do RemoteBackend.batched_get_blocking: nothing is read behind the first missing chunk.

    LMCache reads all at once, and never frees those that came after one that did not.
    """
    found: list[Any] = []
    while len(found) < len(keys) and (not found or found[-1] is not None):
        found.append(self.get_blocking(keys[len(found)]))
    return found + [None] * (len(keys) - len(found))


async def _close(_replaced: Callable[..., Any], self: Any) -> None:
    """Do RedisConnector.close: on their own loop, waiting for the workers would never end."""
    for worker in self.pq_executor._workers:
        worker.cancel()
    await self.connection.close()


def _sleeps(method: Any) -> bool:
    """Tell whether a method asks for memory in the way that sleeps until there is some."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "allocate"
        and not any(keyword.arg == "busy_loop" for keyword in call.keywords)
        for call in _calls(method)
    )


def _waits_forever(method: Any) -> bool:
    """Tell whether a method asks a future for its result without a limit."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "result"
        and not (call.args or call.keywords)
        for call in _calls(method)
    )


def _calls(method: Any) -> list[ast.Call]:
    code = ast.parse(textwrap.dedent(inspect.getsource(what_runs(method))))
    return [node for node in ast.walk(code) if isinstance(node, ast.Call)]


FIX = Fix(
    id="B8",
    title="LMCache's event loop can wait for itself forever",
    link="https://github.com/LMCache/LMCache/issues/2942",
    reason=(
        "A read that finds no staging memory sleeps on the event loop, but only that loop can "
        "finish the stores that hold the memory. The loop hangs, and so do lookups, which have no "
        "time limit, and with them the engine. Each read that is given up also ends one of four "
        "workers and keeps its memory, and closing waits for the loop on the loop. The fix lets "
        "reads wait outside the loop, within LMCache's own limit; then they are misses."
    ),
    probe=probe,
    apply=apply,
)
