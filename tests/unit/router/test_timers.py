"""A limit of time that is set anew many times a second, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any, cast

import pytest
from pdkit_router.timers import LazyTimer


class Clock:
    """A loop's clock and timers."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def call_at(self, when: float, action: Callable[[], Any]) -> asyncio.TimerHandle:
        self.made += 1
        handle = asyncio.TimerHandle(when, action, (), cast(asyncio.AbstractEventLoop, self))
        heapq.heappush(self._timers, (when, self.made, handle))
        return handle

    def go_to(self, end: float) -> None:
        while self._timers and self._timers[0][0] <= end:
            self.now, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                handle._run()
        self.now = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> LazyTimer:
    return LazyTimer(cast(asyncio.AbstractEventLoop, clock))


def acting(clock: Clock, acted: list[float]) -> Callable[[], None]:
    return lambda: acted.append(clock.now)


@pytest.mark.parametrize("times", [(10, 60), (60, 10), (10, 10)])
def test_the_last_limit_applies(clock: Clock, limit: LazyTimer, times: tuple[float, float]) -> None:
    first, last = list[float](), list[float]()
    limit.set(times[0], acting(clock, first))
    clock.go_to(5)
    limit.set(times[1], acting(clock, last))
    clock.go_to(1000)
    assert not first
    assert last == [5 + times[1]], "once"


@pytest.mark.parametrize("end", [LazyTimer.lift, LazyTimer.cancel])
def test_a_cancelled_timer_does_nothing(
    clock: Clock, limit: LazyTimer, end: Callable[[LazyTimer], None]
) -> None:
    acted = list[float]()
    limit.set(10, acting(clock, acted))
    end(limit)
    clock.go_to(1000)
    assert not acted
    assert clock.made == 1, "no timer is left"
    limit.set(1, acting(clock, acted))
    clock.go_to(2000)
    assert acted == [1001], "the next one does"


def test_many_requests_make_few_timers(clock: Clock, limit: LazyTimer) -> None:
    """As a busy connection has them: head, body, the answer without a limit, idle."""
    acted = list[float]()
    for _ in range(1000):
        for after in (10, 60):
            limit.set(after, acting(clock, acted))
        limit.lift()
        limit.set(120, acting(clock, acted))
        clock.go_to(clock.now + 0.1)
    assert not acted
    assert clock.made <= 2 * 1000 * 0.1 / 10 + 2, "one of each ten seconds, and of its end"
    clock.go_to(1000)
    assert acted == [pytest.approx(99.9 + 120)]
