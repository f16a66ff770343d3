"""Limits of time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LOOKS = 10


class LazyTimer:
    """A limit of time that is set anew many times a second.

    A timer that ends before the limit stays, to look again: a request has three limits, and would
    otherwise make, and cancel, a timer for each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf

    def set(self, after_s: float, action: Callable[[], None]) -> None:
        """Act after a time, unless it is set again or lifted by then."""
        self._at, self._action = self._loop.time() + after_s, action
        if self._timer is None or self._timer.when() > self._at:
            self.cancel()
            self._timer = self._loop.call_at(self._at, self._look)

    def lift(self) -> None:
        """Have no limit."""
        self._at = math.inf

    def cancel(self) -> None:
        """Have no timer either."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._at <= self._loop.time():
            self._action()
        elif self._at < math.inf:
            self._timer = self._loop.call_at(self._at, self._look)


@asynccontextmanager
async def timeout(limit_s: float) -> AsyncIterator[None]:
    """Limit the time for an answer, as `asyncio.timeout` does, but not for delays of a busy loop.

    Large bodies hold up this process. The time is made of parts, and between two of them the loop
    reads what has come.
    """
    loop, left = asyncio.get_running_loop(), _LOOKS
    timer = LazyTimer(loop)

    def look() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            timer.set(limit_s / _LOOKS, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        look()
        try:
            yield
        finally:
            timer.cancel()
