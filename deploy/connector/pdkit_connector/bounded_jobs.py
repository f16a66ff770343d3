"""Bounded store jobs for LMCache: a waiter that gives up kills no worker and leaves no job.

LMCache runs the jobs of a Redis connector in four tasks. A job whose waiter was cancelled ends such
a task, since its result can no longer be set; after four of them nothing is read or stored again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdkit_connector.log import get_logger
from pdkit_connector.redis_reads import release, timeout_s
from pdkit_connector.registry import describe

_CLOSE_S = 5.0


async def survivable(
    submit_job: Callable[..., Any], self: Any, fn: Any, *args: Any, **kwargs: Any
) -> Any:
    """Do AsyncPQExecutor.submit_job: giving up ends the job and gives back what it read."""
    if not asyncio.iscoroutinefunction(fn):
        return await submit_job(self, fn, *args, **kwargs)
    job = _Job(fn, args, {k: v for k, v in kwargs.items() if k != "priority"})
    priority = {k: v for k, v in kwargs.items() if k == "priority"}
    queued = asyncio.ensure_future(submit_job(self, job.run, **priority))
    try:
        return await asyncio.shield(queued)
    except asyncio.CancelledError:
        job.give_up()
        queued.add_done_callback(_give_back)
        raise


class _Job:
    """One job, run by a worker that outlives it."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._call = fn, args, kwargs
        self._task: asyncio.Future[Any] | None = None
        self._given_up = False

    def give_up(self) -> None:
        """End the job, or keep it from starting."""
        self._given_up = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> Any:
        """Run the job; None where it was given up."""
        if self._given_up:
            return None
        fn, args, kwargs = self._call
        self._task = asyncio.ensure_future(fn(*args, **kwargs))
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self._given_up:
                raise  # the worker itself is being stopped
            return None


def _give_back(queued: asyncio.Future[Any]) -> None:
    if queued.cancelled() or queued.exception() is not None:
        return
    result = queued.result()
    results = result if isinstance(result, list) else [result]
    release(item for item in results if hasattr(item, "ref_count_down"))


def closable(shutdown: Callable[..., Any], self: Any, wait: bool = True) -> Any:
    """Do AsyncPQExecutor.shutdown: on its own loop it must not wait for that loop."""
    if asyncio._get_running_loop() is not self.loop:
        return shutdown(self, wait)
    ending = getattr(self, "shutdown_async", None) or self._shutdown_async
    # A task, since a caller that does not await it would never run a coroutine.
    return asyncio.ensure_future(_bounded(ending(wait)))


async def _bounded(ending: Coroutine[Any, Any, Any]) -> None:
    try:
        await asyncio.wait_for(ending, _CLOSE_S)
    except asyncio.TimeoutError:
        get_logger().warning("pdkit-connector WARNING store jobs unfinished after %g s", _CLOSE_S)


def limited_contains(contains: Callable[..., bool], self: Any, key: Any, pin: bool = False) -> bool:
    """Do RemoteBackend.contains: no answer within LMCache's own limit is a miss."""
    extra = self.config.extra_config or {}
    if self.connection is None or extra.get("use_exists_sync", False):
        return contains(self, key, pin)
    if self._mla_worker_id_as0_mode:
        key = key.with_new_worker_id(0)
    return bool(result_of(self.connection.exists(key), self.loop, self.config, False))


def limited_exists(self: Any, key: Any) -> bool:
    """Replace a Redis connector's exists_sync: no answer within the limit is a miss."""
    config = getattr(self.local_cpu_backend, "config", None)
    return bool(result_of(self.exists(key), self.loop, config, False))


def result_of(coroutine: Coroutine[Any, Any, Any], loop: Any, config: Any, missed: Any) -> Any:
    """Run on LMCache's loop from another thread; `missed` after the limit or an error."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s(config))
    except Exception as exc:  # noqa: BLE001 - any failure to find out is a miss
        future.cancel()
        get_logger().warning("pdkit-connector WARNING lookup failed: %s", describe(exc))
        return missed
