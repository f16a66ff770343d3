"""The store barrier: a producer's answer leaves when its KV can be read, or a deadline has passed.

An engine's API server and its workers are processes of their own. Each worker answers on a socket;
the API server's middleware asks all of them before it lets an answer go. The workers go on
computing: nothing waits but the answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Hashable, MutableMapping
from typing import Any

from pdkit_connector.log import get_logger

# The engine's name, unlike any other's on this machine; without it there is no barrier.
NAME_ENV = "PDKIT_STORE_BARRIER"
WORKERS_ENV = "PDKIT_STORE_BARRIER_WORKERS"
DEADLINE_ENV = "PDKIT_STORE_BARRIER_S"
DEFAULT_DEADLINE_S = 10.0

_STORED, _LATE = b"1", b"0"
_TICK_S = 0.002
_LISTEN_S = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def barrier_name() -> str | None:
    """Return the engine's name, None where the kit asked for no barrier."""
    return os.environ.get(NAME_ENV) or None


def deadline_s() -> float:
    """Return how long an answer is held back at most, in seconds."""
    return float(os.environ.get(DEADLINE_ENV) or DEFAULT_DEADLINE_S)


def address(name: str, worker: int) -> str:
    """Return a worker's socket, of Linux's abstract kind: it is gone with its process."""
    return f"\0pdkit-store-barrier/{os.getuid()}/{name}/{worker}"


def stores_ended(under_way: Callable[[], set[Hashable]]) -> Callable[[float], Awaitable[bool]]:
    """Return a waiter for the stores that are under way when it is called.

    `under_way` returns a copy of what stands for each store; it is called from a thread of the
    barrier's own. The waiter takes a limit in seconds and returns whether all ended within it.
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


def serve(name: str, worker: int, under_way: Callable[[], set[Hashable]]) -> None:
    """Answer whoever asks whether this worker's stores have ended; returns once it listens.

    A daemon thread does so until the process ends.
    """
    wait = stores_ended(under_way)
    listening = threading.Event()

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(_STORED if await wait(deadline_s()) else _LATE)
            await writer.drain()
        except ConnectionError:
            pass  # the client went away, and its answer with it
        finally:
            writer.close()

    async def run() -> None:
        try:
            server = await asyncio.start_unix_server(answer, address(name, worker), backlog=1024)
        except OSError as exc:
            get_logger().error("pdkit-connector ERROR no store barrier: %s", exc)
            listening.set()
            return
        listening.set()
        async with server:
            await server.serve_forever()

    threading.Thread(
        target=lambda: asyncio.run(run()), name="pdkit-store-barrier", daemon=True
    ).start()
    listening.wait(_LISTEN_S)


async def stored(name: str, worker: int, limit_s: float) -> bool | None:
    """Ask one worker; None where it has no barrier, or broke it off."""

    async def ask() -> bytes:
        reader, writer = await asyncio.open_unix_connection(address(name, worker))
        try:
            return await reader.read(1)
        finally:
            writer.close()

    try:
        # The worker keeps the deadline; this one is for a worker that hangs.
        said = await asyncio.wait_for(ask(), limit_s + 1)
    except (OSError, asyncio.TimeoutError):
        return None
    return said == _STORED if said else None


class HoldUntilStored:
    """ASGI middleware for a producer: holds the first byte of an answer until its KV is stored.

    By then the prompt's last step has begun its stores. Only POST is held, which is all that
    computes.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._name = barrier_name()
        self._workers = int(os.environ.get(WORKERS_ENV) or 1)
        self._told: set[str] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._name is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        held = True

        async def hold(message: Message) -> None:
            nonlocal held
            if held and message["type"] == "http.response.body":
                held = False
                await self._hold(self._name or "")
            await send(message)

        await self._app(scope, receive, hold)

    async def _hold(self, name: str) -> None:
        limit_s = deadline_s()
        asked = (stored(name, worker, limit_s) for worker in range(self._workers))
        said = await asyncio.gather(*asked)
        if None in said:
            self._tell_once("a worker answers no store barrier: answers may leave before their KV")
        elif not all(said):
            self._tell_once(
                f"KV was not stored within {limit_s:g} s: answers leave before their KV, which "
                "consumers compute again"
            )

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            get_logger().warning("pdkit-connector WARNING %s", what)
