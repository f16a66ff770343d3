"""Who may use the router, and limits on what clients use."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from pdkit_router.errors import Refused
from pdkit_router.request import Request

HEAD_BYTES = 32 * 1024  # of a request
_LOOKS = 10
_LARGE_BYTES = 2**19  # a body that takes more than ten milliseconds to read


@dataclass
class ClientLimits:
    """What clients may take.

    Attributes:
        body_bytes: of one request.
        held_bytes: of all bodies together, at least two of the largest. What a request takes beside
            its body (a second copy, its text and token ids once more) is in proportion, so that a
            GiB is enough for all of it.
        head_s, body_s: for sending them.
        idle_s: between two requests of a connection.
        stuck_s: that a client may leave its answer unread.
    """

    connections: int = 2048
    requests: int = 1024
    body_bytes: int = 64 * 2**20
    held_bytes: int = 128 * 2**20
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 120.0
    stuck_s: float = 60.0


@dataclass
class Budget:
    """How often requests may be tried again, so that all who do so make no failure worse."""

    size: float = 256.0
    a_second: float = 16.0
    left: float = 256.0
    at: float = 0.0

    def take(self) -> bool:
        """Take one of what is left; False if nothing is."""
        now = asyncio.get_running_loop().time()
        self.left = min(self.size, self.left + (now - self.at) * self.a_second)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


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


class Turns:
    """Lets large bodies be read one after the other, with all else that waits between two."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, body_bytes: int) -> None:
        """Return when a body of this size may be read, which must happen at once."""
        if body_bytes >= _LARGE_BYTES:
            async with self._lock:
                await asyncio.sleep(0)


class Door(Protocol):
    """Says who is let in."""

    def check(self, request: Request) -> None:
        """Raise Refused where a request is not."""


def too_many() -> Refused:
    """Return the refusal of a request for which there is no room now."""
    return Refused(429, "too many requests are being answered", retry_after_s=1)


def long_head() -> Refused:
    """Return the refusal of a request whose head, or what is beside its body, is too long."""
    return Refused(431, f"the head of the request is larger than {HEAD_BYTES} bytes")


def large_body(limit_bytes: int) -> Refused:
    """Return the refusal of a request whose body is larger than this."""
    return Refused(
        413, f"the body is larger than {limit_bytes} bytes; deploy.yaml can allow more: "
        "router.max_body_mib",
    )  # fmt: skip
