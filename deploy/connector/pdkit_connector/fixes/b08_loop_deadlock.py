"""B8: LMCache's event loop waits for memory, or for itself, and everything waits for the loop."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from pdkit_connector.bounded_jobs import (
    closable,
    limited_contains,
    limited_exists,
    survivable,
)
from pdkit_connector.layer_steps import replace_method, silent, what_runs
from pdkit_connector.log import NAME
from pdkit_connector.loop_probe import FakeRedis, idle_connector, named_key, run_aside
from pdkit_connector.redis_reads import METADATA, PAYLOAD, connectors, read_prefix
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.setting import Setting

_CONNECTOR = "lmcache.v1.storage_backend.connector.redis_connector"


def probe(_setting: Setting) -> ProbeResult:
    """Read with no memory left, give up on a job, and look for waits without a limit."""
    endless = [what for what, _ in _endless()]
    if endless:
        return ProbeResult(Need.NEEDED, "; ".join(endless))
    return ProbeResult(Need.NOT_NEEDED, "nothing waits on the event loop, or without a limit")


def apply(_setting: Setting) -> str:
    """Fix what the probe found."""
    fixed = []
    for what, fix in list(_endless()):
        fix()
        fixed.append(what)
    return f"{len(fixed)} waits bounded"


def _endless() -> Iterator[tuple[str, Callable[[], None]]]:
    from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    kind: Any
    for kind in connectors():
        if _sleeps(kind):
            yield f"{kind.__name__} sleeps on the loop for memory", _reads_of(kind)
        if _waits_forever(kind.exists_sync):
            yield f"{kind.__name__}.exists_sync has no limit", _exists_of(kind)
    if _waits_forever(RemoteBackend.contains):
        yield (
            "contains has no limit",
            lambda: replace_method(RemoteBackend, "contains", limited_contains),
        )
    if run_aside(_worker_dies(AsyncPQExecutor)):
        yield (
            "a worker dies when its waiter gives up",
            lambda: replace_method(AsyncPQExecutor, "submit_job", survivable),
        )
    if _waits_forever(AsyncPQExecutor.shutdown):
        yield (
            "closing waits for the loop on the loop",
            lambda: replace_method(AsyncPQExecutor, "shutdown", closable),
        )


def _reads_of(kind: Any) -> Callable[[], None]:
    def fix() -> None:
        kind._get = _get

    return fix


def _exists_of(kind: Any) -> Callable[[], None]:
    def fix() -> None:
        kind.exists_sync = limited_exists

    return fix


async def _get(self: Any, key: Any) -> Any:
    found = await read_prefix(self, [key])
    return found[0] if found else None


def _sleeps(kind: type) -> bool:
    """Read a chunk with no memory left, and see how memory was asked for."""
    from lmcache.v1.storage_backend.connector import redis_connector

    asked: list[bool] = []

    def allocate(*_args: Any, busy_loop: bool = True, **_kwargs: Any) -> None:
        asked.append(busy_loop)

    pool = SimpleNamespace(allocate=allocate, config=SimpleNamespace(blocking_timeout_secs=0))
    fact = SimpleNamespace(length=1, shapes=[], dtypes=[], shape=None, dtype=None, fmt=None)
    client = FakeRedis({f"a{METADATA}": b"a", f"a{PAYLOAD}": b"a"})
    real = redis_connector.RemoteMetadata
    redis_connector.RemoteMetadata = SimpleNamespace(deserialize=lambda _text: fact)
    try:
        with silent(_CONNECTOR, NAME):
            run_aside(idle_connector(kind, client, pool)._get(named_key("a")))
    finally:
        redis_connector.RemoteMetadata = real
    return any(asked)


async def _worker_dies(kind: Any) -> bool:
    """Give up on a job that is under way, let it end, and see whether its worker lives."""
    executor = kind(asyncio.get_running_loop(), max_workers=1)
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def job() -> None:
        await gate

    waiter = asyncio.ensure_future(executor.submit_job(job))
    await _turns()
    waiter.cancel()
    await _turns()
    if not gate.done():
        gate.set_result(None)
    await _turns()
    return bool(executor._workers[0].done())


async def _turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def _waits_forever(method: Any) -> bool:
    """Return whether a method's own code asks a future for its result without a limit."""
    code = ast.parse(textwrap.dedent(inspect.getsource(what_runs(method))))
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "result"
        and not node.args
        and not node.keywords
        for node in ast.walk(code)
    )


FIX = Fix(
    id="B8",
    title="LMCache's event loop can wait for itself forever",
    link="https://github.com/LMCache/LMCache/issues/2942",
    reason=(
        "A read that finds no staging memory sleeps on the event loop, but only that loop can "
        "finish the stores that hold the memory. The loop hangs, and so do lookups, which have no "
        "time limit, and with them the engine. Each read that is given up also ends one of four "
        "workers, and closing waits for the loop on the loop. The fix lets reads wait outside the "
        "loop, within LMCache's own limit; then they are misses."
    ),
    probe=probe,
    apply=apply,
)
