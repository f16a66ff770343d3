"""LMCache's store jobs (B8): giving up on one, and stopping them all."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
from pdkit_connector.bounded_jobs import closable, survivable
from pdkit_connector.layer_steps import replace_method
from pdkit_connector.loop_probe import run_aside


@pytest.fixture
def mended(restored):
    """Mend the executor as B8 does."""
    restored(AsyncPQExecutor, "submit_job", "shutdown")
    replace_method(AsyncPQExecutor, "submit_job", survivable)
    replace_method(AsyncPQExecutor, "shutdown", closable)


@pytest.mark.usefixtures("mended")
def test_job_given_up_ends_and_its_worker_serves_the_next():
    ended, released = [], []

    async def job(result):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            ended.append(result)
            raise
        return result

    async def run():
        executor = AsyncPQExecutor(asyncio.get_running_loop(), max_workers=1)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(executor.submit_job(job, "lost", priority=1), 0.01)
        obj = SimpleNamespace(ref_count_down=lambda: released.append(1))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(executor.submit_job(too_late_to_end, [obj, None]), 0.01)
        with pytest.raises(ZeroDivisionError):
            await executor.submit_job(fail)
        assert await executor.submit_job(job, [obj, None]) == [obj, None]
        await executor.shutdown(wait=True)
        return [worker.done() for worker in executor._workers]

    async def too_late_to_end(result):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        return result

    async def fail():
        raise ZeroDivisionError

    assert run_aside(run()) == [True]
    assert ended == ["lost"] * 3
    assert released == [1]


@pytest.mark.usefixtures("mended")
def test_jobs_given_up_in_the_queue_never_start():
    started = []

    async def first():
        await asyncio.sleep(0.05)

    async def second():
        started.append("second")

    async def run():
        executor = AsyncPQExecutor(asyncio.get_running_loop(), max_workers=1)
        busy = asyncio.ensure_future(executor.submit_job(first))
        await asyncio.sleep(0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(executor.submit_job(second), 0.01)
        await busy
        await asyncio.sleep(0.01)

    run_aside(run())
    assert started == []


def test_a_coroutine_runs_aside_of_a_running_loop():
    async def outer():
        return run_aside(asyncio.sleep(0, "inner")), asyncio.get_running_loop()

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(outer()) == ("inner", loop)
    loop.close()
