"""The store barrier: a producer's answer is sent when its KV can be read, or after a deadline.

Each worker knows which of its stores are under way; the API server's middleware asks all of them
before it lets an answer go. The workers go on computing: nothing waits but the answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING

from pdkit_connector import spans
from pdkit_connector.counters import COUNTERS
from pdkit_connector.log import get_logger
from pdkit_connector.worker_socket import ask, engine_name, workers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send

DEADLINE_ENV = "PDKIT_STORE_BARRIER_S"
DEFAULT_DEADLINE_S = 10.0
QUESTION = "stored"

STORED, LATE = b"1", b"0"
_TICK_S = 0.002

# One token a store of this process that was begun and has not ended. Adding, discarding and copying
# run no code of the tokens, so that threads need no lock.
_under_way: set[Hashable] = set()


def begin() -> Hashable:
    """Note that a store begins; return what `end` takes."""
    token = object()
    _under_way.add(token)
    return token


def end(token: Hashable) -> None:
    """Note that a store has ended, well or not."""
    _under_way.discard(token)


def under_way() -> set[Hashable]:
    """Return a copy of the tokens of this process' stores that have not ended."""
    return _under_way.copy()


def deadline_s() -> float:
    """Return how long an answer is held back at most, in seconds."""
    return float(os.environ.get(DEADLINE_ENV) or DEFAULT_DEADLINE_S)


def stores_ended(under_way: Callable[[], set[Hashable]]) -> Callable[[float], Awaitable[bool]]:
    """Return a waiter for the stores that are under way when it is called.

    `under_way` returns a copy of what stands for each store; it is called from the thread that
    waits. The waiter takes a limit in seconds and returns whether all ended within it.
    """
    given_up: set[Hashable] = set()

    async def wait(limit_s: float) -> bool:
        until = asyncio.get_running_loop().time() + limit_s
        awaited = under_way() - given_up
        while awaited:
            if asyncio.get_running_loop().time() >= until:
                # A store that hangs holds up the answers of now, not all that follow.
                given_up.intersection_update(under_way())
                given_up.update(awaited)
                return False
            await asyncio.sleep(_TICK_S)
            awaited &= under_way()
        return True

    return wait


def answer(
    under_way: Callable[[], set[Hashable]] = under_way,
    then: Callable[[float], Awaitable[bool]] | None = None,
) -> Callable[[], Awaitable[bytes]]:
    """Return a worker's answer to QUESTION, given when the stores of that moment have ended.

    `then` waits for what another process still does for them, in the seconds that are left.
    """
    wait = stores_ended(under_way)

    async def when_stored() -> bytes:
        until = time.monotonic() + deadline_s()
        ended = await wait(deadline_s())
        if ended and then:
            ended = await then(max(0.0, until - time.monotonic()))
        return STORED if ended else LATE

    return when_stored


async def stored(name: str, worker: int, limit_s: float) -> bool | None:
    """Ask one worker; None where it has no barrier, or broke it off."""
    # The worker keeps the deadline; this one is for a worker that hangs.
    reply = await ask(name, worker, QUESTION, limit_s + 1)
    return reply == STORED if reply else None


class HoldUntilStored:
    """ASGI middleware for a producer: holds the first byte of an answer until its KV is stored.

    By then the prompt's last step has begun its stores. Only POST is held, which is all that
    computes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._name = engine_name()
        self._workers = workers()
        self._logged: set[str] = set()
        # A count that appears with its first event would hide that event from Prometheus.
        for result in ("stored", "late", "absent"):
            COUNTERS.add("barrier_waits", 0, result=result)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._name is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        held = True

        async def hold(message: Message) -> None:
            nonlocal held
            if held and message["type"] == "http.response.body":
                held, began_ns = False, time.time_ns()
                result = await self._hold(self._name or "")
                spans.note(
                    "store", spans.of_scope(scope.get("headers", ())), began_ns, result=result
                )
            await send(message)

        await self._app(scope, receive, hold)

    async def _hold(self, name: str) -> str:
        began, limit_s = time.perf_counter(), deadline_s()
        asked = (stored(name, worker, limit_s) for worker in range(self._workers))
        replies = await asyncio.gather(*asked)
        COUNTERS.add("barrier_seconds", time.perf_counter() - began)
        if None in replies:
            result = "absent"
            self._tell_once(
                "a worker does not answer: responses may be sent before their KV is stored"
            )
        elif not all(replies):
            result = "late"
            self._tell_once(
                f"KV was not stored within {limit_s:g} s: responses are sent before, and "
                "consumers compute it again"
            )
        else:
            result = "stored"
        COUNTERS.add("barrier_waits", result=result)
        return result

    def _tell_once(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            get_logger().warning("pdkit-connector WARNING %s", what)
