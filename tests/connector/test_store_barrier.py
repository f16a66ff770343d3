"""The store barrier between two processes' worth of code: who waits, for what, and how long."""

from __future__ import annotations

import asyncio
import itertools
import os
from types import SimpleNamespace

import pytest
import uvloop
from pdkit_connector import store_barrier, worker_socket
from pdkit_connector.counters import COUNTERS
from pdkit_connector.store_barrier import HoldUntilStored, stored, stores_ended

# vLLM's API server runs on uvloop, which differs where sockets are odd; engines always have it.
RUNS = {"asyncio": asyncio.run, "uvloop": uvloop.run}

_names = (f"test-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture
def name(monkeypatch):
    name = next(_names)
    monkeypatch.setenv(worker_socket.NAME_ENV, name)
    monkeypatch.setenv(store_barrier.DEADLINE_ENV, "0.3")
    return name


def serve(name, worker, under_way, then=None):
    stored = store_barrier.answer(under_way, then=then)
    worker_socket.serve(name, worker, {store_barrier.QUESTION: stored})


async def listening(name: str, worker: int = 0) -> None:
    for _ in range(200):
        if await stored(name, worker, 0.5) is not None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the barrier does not listen")


@pytest.fixture
def waits():
    """Return what says how often answers were held in this test, by what became of it."""

    def counted():
        results = ("stored", "late", "absent")
        return {each: COUNTERS.value("barrier_waits", result=each) for each in results}

    before = counted()
    return lambda: {
        each: now - before[each] for each, now in counted().items() if now != before[each]
    }


@pytest.fixture(params=sorted(RUNS))
def run(request):
    """Return what runs a coroutine on the API server's event loop."""
    return RUNS[request.param]


async def answered(path: str = "/v1/completions", method: str = "POST", times: int = 1) -> list:
    """Return the body chunks a client gets of an answer, each with the time it took."""
    loop = asyncio.get_running_loop()
    seen: list[tuple[bytes, float]] = []

    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        for number in range(times):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})

    async def send(message):
        if message["type"] == "http.response.body":
            seen.append((message["body"], loop.time() - began))

    began = loop.time()
    scope = {"type": "http", "method": method, "path": path}
    await HoldUntilStored(engine)(scope, None, send)
    return seen


def test_an_answer_waits_for_the_stores_begun_before_it_and_no_later_ones(
    name, monkeypatch, run, waits
):
    monkeypatch.setenv(store_barrier.DEADLINE_ENV, "60")
    under_way: set[str] = set()
    looks = 0

    def looked_at():
        """The first store ends, and another begins, while someone waits for it."""
        nonlocal looks
        if "first" in under_way and (looks := looks + 1) == 3:
            under_way.add("of another request")
            under_way.discard("first")
        return under_way.copy()

    serve(name, 0, looked_at)

    async def scenario():
        await listening(name)
        under_way.add("first")
        return await answered(times=2)

    assert [body for body, _ in run(scenario())] == [b"0", b"1"]
    assert (looks, under_way, waits()) == (3, {"of another request"}, {"stored": 1})


def test_a_store_that_hangs_delays_one_answer_only(name, run, waits):
    under_way: set[str] = set()
    serve(name, 0, under_way.copy)

    async def scenario():
        await listening(name)
        under_way.add("hangs")
        ((_, seconds),) = await answered()
        assert (seconds > 0.29, waits()) == (True, {"late": 1})
        await answered()
        assert waits() == {"late": 1, "stored": 1}

    run(scenario())


def test_what_another_process_does_for_them_is_awaited_in_the_time_that_is_left(
    name, monkeypatch, run, waits
):
    monkeypatch.setenv(store_barrier.DEADLINE_ENV, "60")
    limits, ends = [], iter((True, False))

    async def then(limit_s):
        limits.append(limit_s)
        return next(ends)

    under_way: set[str] = set()
    serve(name, 0, under_way.copy, then)

    async def scenario():
        for _ in range(2):
            await answered()

    run(scenario())
    assert waits() == {"stored": 1, "late": 1}
    assert all(0 < limit_s <= 60 for limit_s in limits)


def test_every_worker_is_asked(name, monkeypatch, run):
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")
    under_way: set[str] = set()
    serve(name, 0, set)
    serve(name, 1, under_way.copy)

    async def scenario():
        await listening(name, 0)
        await listening(name, 1)
        under_way.add("of the second worker")
        return await answered()

    assert run(scenario())[0][1] > 0.29


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_requests_that_compute_nothing_do_not_wait(name, method, run, waits):
    under_way: set[str] = set()
    serve(name, 0, under_way.copy)

    async def scenario():
        await listening(name)
        under_way.add("hangs")
        return await answered(method=method)

    assert run(scenario())
    assert waits() == {}


def test_an_answer_leaves_with_one_warning_if_no_worker_answers(name, monkeypatch, run):
    told = []
    logger = SimpleNamespace(warning=lambda *line: told.append(line))
    monkeypatch.setattr(store_barrier, "get_logger", lambda: logger)
    middleware = HoldUntilStored(_answers)

    async def scenario():
        for _ in range(3):
            await middleware({"type": "http", "method": "POST"}, None, _ignores)

    run(scenario())
    assert len(told) == 1


def test_no_worker_is_asked_without_a_socket_name(monkeypatch, run):
    monkeypatch.delenv(worker_socket.NAME_ENV, raising=False)
    monkeypatch.setattr(store_barrier, "stored", None)
    assert run(answered())[0][0] == b"0"


def test_a_store_begun_while_waiting_is_not_awaited(run):
    under_way = {"a"}
    wait = stores_ended(lambda: set(under_way))

    async def scenario():
        waiting = asyncio.create_task(wait(1))
        await asyncio.sleep(0.01)
        under_way.add("b")
        under_way.discard("a")
        return await waiting

    assert run(scenario()) is True


async def _answers(scope, receive, send):
    await send({"type": "http.response.body", "body": b""})


async def _ignores(message):
    pass
