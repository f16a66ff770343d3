"""LMCache's store jobs (B8): giving up on one, and stopping them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from pdkit_connector.bounded_jobs import closable, survivable
from pdkit_connector.layer_steps import replace_method
from pdkit_connector.loop_probe import run_aside


@pytest.fixture
def fixed(restored):
    """Fix the executor as B8 does."""
    restored(AsyncPQExecutor, "submit_job", "shutdown")
    replace_method(AsyncPQExecutor, "submit_job", survivable)
    replace_method(AsyncPQExecutor, "shutdown", closable)


async def give_up(submitted, begun: Callable[[], object]) -> None:
    """Cancel a job that has begun, as one does who waited for it long enough."""
    waiting = asyncio.ensure_future(submitted)
    while not begun():
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.usefixtures("fixed")
def test_an_abandoned_job_ends_and_its_worker_takes_the_next():
    begun, ended, released = [], [], []

    async def hangs(result):
        begun.append(result)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(result)
            raise

    async def too_late_to_end(result):
        begun.append(result)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return result

    async def works(result):
        return result

    async def fail():
        raise ZeroDivisionError

    async def run():
        executor = AsyncPQExecutor(asyncio.get_running_loop(), max_workers=1)
        for count in range(1, 4):
            job = executor.submit_job(hangs, "lost", priority=1)
            await give_up(job, lambda count=count: len(begun) == count)
        obj = SimpleNamespace(ref_count_down=lambda: released.append(1))
        await give_up(executor.submit_job(too_late_to_end, [obj, None]), lambda: len(begun) == 4)
        with pytest.raises(ZeroDivisionError):
            await executor.submit_job(fail)
        assert await executor.submit_job(works, [obj, None]) == [obj, None]
        await executor.shutdown(wait=True)
        return [worker.done() for worker in executor._workers]

    assert run_aside(run()) == [True]
    assert ended == ["lost"] * 3
    assert released == [1]


@pytest.mark.usefixtures("fixed")
def test_jobs_abandoned_in_the_queue_never_start():
    started = []

    async def noted(name):
        started.append(name)

    async def run():
        gate = asyncio.Event()
        executor = AsyncPQExecutor(asyncio.get_running_loop(), max_workers=1)
        busy = asyncio.ensure_future(executor.submit_job(gate.wait))
        turns = iter(range(20))
        await give_up(executor.submit_job(noted, "second"), lambda: next(turns) == 19)
        gate.set()
        await busy
        await executor.submit_job(noted, "third")

    run_aside(run())
    assert started == ["third"]


def test_a_coroutine_runs_beside_a_running_loop():
    async def outer():
        return run_aside(asyncio.sleep(0, "inner")), asyncio.get_running_loop()

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(outer()) == ("inner", loop)
    loop.close()
