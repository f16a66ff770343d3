"""The side of engines: one HTTP/1.1 exchange at a time on each of an engine's connections."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

import httptools

from pdkit_router.timers import timeout

_CONNECT_S = 2.0
# Engines close what was idle for five seconds; a request must not cross with that.
_IDLE_S = 2.0
# Bytes of an answer that are held before it is passed on: until then another engine can give it.
HELD_BYTES = 64 * 2**10
_LARGEST = 8 * 2**20  # bytes of an answer that is for the router itself, and of an error


class EngineLost(Exception):
    """No engine there, or it broke off.

    Attributes:
        asked: it may have begun to compute.
        stale: the connection was used before, so that the engine may only have closed that.
    """

    def __init__(self, why: str, *, asked: bool, stale: bool = False) -> None:
        super().__init__(why)
        self.asked, self.stale = asked, stale


class Exchange:
    """An answer of an engine, as it comes.

    Attributes:
        status: 0 until it is known.
        content_type: of the answer.
        held: the part of its body that has arrived and was not passed on.
        started: done with the first of the body, or its end.
        ended: done when the whole body has arrived. Both fail with EngineLost.
    """

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        loop = asyncio.get_running_loop()
        self.status = 0
        self.content_type = ""
        self.held = bytearray()
        self.sink: Callable[[bytes], None] | None = None
        self.started: asyncio.Future[None] = loop.create_future()
        self._full: asyncio.Future[None] | None = None
        self._unlimited = False
        self.ended: asyncio.Future[None] = loop.create_future()

    def feed(self, piece: bytes) -> None:
        """Take a piece of the body; pause the engine if too much is held for a slow client."""
        if self.sink is not None:
            self.sink(piece)
            return
        self.held += piece
        if not self.started.done():
            self.started.set_result(None)
        if len(self.held) >= HELD_BYTES and not self._unlimited:
            self.pause(True)
            if self._full is not None and not self._full.done():
                self._full.set_result(None)

    def pause(self, wanted: bool) -> None:
        """Read no more of it, or go on."""
        self._connection.pause(self, wanted)

    def pass_to(self, sink: Callable[[bytes], None]) -> None:
        """Hand on what is held, and then all that comes; the sink may pause it."""
        held, self.held = bytes(self.held), bytearray()
        self.sink = sink
        self.pause(False)
        if held:
            sink(held)

    async def rest(self) -> None:
        """Hold all of it, however long it is."""
        self._unlimited = True
        self.pause(False)
        await self.ended

    async def beginning(self) -> None:
        """Wait until as much is held as may be before it is passed on, or all of it came."""
        if not self.ended.done() and len(self.held) < HELD_BYTES:
            self._full = asyncio.get_running_loop().create_future()
            await self._full

    def finish(self, problem: Exception | None) -> None:
        """End everything that waits for the answer, with an error if there is a problem."""
        for future in (self.started, self._full, self.ended):
            if future is None or future.done():
                continue
            if problem is None:
                future.set_result(None)
            else:
                future.set_exception(problem)
                future.exception()  # others that wait have got it


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, home: Connections) -> None:
        self._home = home
        self._paused = False
        self._for_client = False
        self.exchange: Exchange | None = None
        self.idle_since = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether a client's answer is to come, and would be read."""
        return self.exchange is not None and self._for_client and not self._paused

    @property
    def has_ended(self) -> bool:
        """Whether an idle connection was closed, which the loop has not seen yet.

        A request that is sent on it would look like one that ended its engine.
        """
        looks = select.poll()
        looks.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(looks.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def start(self, request: bytes, *, for_client: bool = False) -> Exchange:
        """Send a request: the router's own, such as a health check, or one `for_client`."""
        self._for_client = for_client
        self._parser = httptools.HttpResponseParser(self)
        self.exchange = Exchange(self)
        self.transport.write(request)
        return self.exchange

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.transport.abort()  # it speaks without being asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(EngineLost("its answer is not HTTP/1.1", asked=True))
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.exchange is not None and name.lower() == b"content-type":
            self.exchange.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self.exchange is not None:
            self.exchange.feed(piece)
            if len(self.exchange.held) > _LARGEST:
                self._end(EngineLost("its answer is too large", asked=True))
                self.transport.abort()

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.status < 200:  # 100 Continue and similar go before the answer
            exchange.status = 0
            return
        self._end(None)
        self._read(True)  # the next answer is not this one's client's
        if self._parser.should_keep_alive():
            self._home.keep(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._home.forget(self)
        stale = self.idle_since > 0 and self.exchange is not None and not self.exchange.status
        self._end(EngineLost(f"it broke off ({exc or 'closed'})", asked=True, stale=stale))

    def eof_received(self) -> None:
        """Let the transport close."""

    def pause(self, exchange: Exchange, wanted: bool) -> None:
        """Stop reading, or go on, unless another answer has begun."""
        if self.exchange is exchange:
            self._read(not wanted)

    def _read(self, wanted: bool) -> None:
        if self._paused is wanted and not self.transport.is_closing():
            self._paused = not wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def abandon(self) -> None:
        """Break off, which makes the engine stop computing."""
        self._end(EngineLost("abandoned", asked=True))
        self.transport.abort()

    def _end(self, problem: Exception | None) -> None:
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.finish(problem)


class Connections:
    """The connections to one engine."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[EngineConnection] = []
        self.open: set[EngineConnection] = set()

    async def get(self) -> EngineConnection:
        """Return a connection; raises EngineLost where none can be had."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                if loop.time() - connection.idle_since < _IDLE_S and not connection.has_ended:
                    return connection
                connection.transport.close()
        try:
            async with timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self), self._host, self._port
                )
        except (OSError, TimeoutError, ValueError) as exc:  # ValueError: of a host's name
            raise EngineLost(f"it refuses connections ({exc})", asked=False) from exc
        if connection.transport.is_closing():  # lost already: nothing would report it again
            raise EngineLost("it closed a new connection", asked=False)
        self.open.add(connection)
        return connection

    def keep(self, connection: EngineConnection) -> None:
        """Keep an idle connection for the next request; close one that was idle too long."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if len(self._idle) > 1 and self._idle[0].idle_since + _IDLE_S < connection.idle_since:
            self._idle.pop(0).transport.close()

    def forget(self, connection: EngineConnection) -> None:
        """Drop a closed connection."""
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def awaited(self) -> int:
        """Answers that the engine owes clients, without those that slow clients hold up."""
        return sum(one.is_awaited for one in self.open)

    def drop_idle(self) -> None:
        """Close idle connections: a restarted engine does not know them."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()
