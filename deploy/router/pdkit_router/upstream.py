"""Engines: their connections, one HTTP/1.1 exchange at a time on each, and their health."""

from __future__ import annotations

import asyncio
import json
import logging
import select
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import httptools

from pdkit_router.timers import timeout

_log = logging.getLogger("router")
_CONNECT_S = 2.0
# Engines close what was idle for five seconds; a request must not cross with that.
_IDLE_S = 2.0
# Bytes of an answer that are held before it is passed on: until then another engine can give it.
HELD_BYTES = 64 * 2**10
_LARGEST = 8 * 2**20  # bytes of an answer that is for the router itself, and of an error
_EVERY_S = 0.4
_ANSWER_S = 0.5  # so that a death is known within a second
_GREET_S = 5.0  # of what is not used yet: a busy machine may take its time
# Raised when an engine's answer is not the JSON that was expected. It may be any JSON, with
# infinite numbers or too many levels, or no JSON at all.
_ODD = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
# An engine that computes may be silent for a while. After the first limit, requests that have no
# answer yet move to another engine; after the second, streams that have begun end.
_SILENT_S, _LONG_SILENT_S = 5.0, 30.0
# The first request of an engine that came back is the router's own.
_WARM_UP_S, _WARM_UP_TRIES = 20.0, 3

State = Literal["up", "silent", "down"]
BodyPart = bytes | memoryview


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


@dataclass(eq=False)
class Engine:
    """One engine.

    Attributes:
        state: "up"; "silent" if it takes connections and has not answered in time; "down".
        busy: requests that it is working on.
        key: that it asks for; "" if none.
        drained: it gets no new requests, because the operator drains it.
        gone: it took no connection, so that its process must be another one when it answers.
        asked: for its health, once at least.
        unlisted: it lists no models, and the log says so.
        handoffs: of a producer, those that may hold its KV blocks.
        abandoned: those of them that no consumer will read.
        restarts: times that it came back as another process.
    """

    name: str
    host: str
    port: int
    state: State = "down"
    busy: int = 0
    key: str = field(default="", repr=False)
    drained: bool = False
    gone: bool = False
    asked: bool = False
    unlisted: bool = False
    handoffs: int = 0
    abandoned: int = 0
    restarts: int = 0
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = Connections(self.host, self.port)

    def request(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], *body: BodyPart
    ) -> bytes:
        """Return a request as it is sent; its body may come in parts."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}")
        if method == "POST":
            lines.append(f"content-length: {sum(map(len, body))}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        return b"".join([head, *body])

    @asynccontextmanager
    async def exchange(
        self, request: bytes, *, for_client: bool = False,
        on_sent: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Exchange]:  # fmt: skip
        """Send a request; break it off if the block ends before its answer.

        Args:
            request: as it is sent.
            for_client: it is a client's work, not the router's own question.
            on_sent: called when the engine may have the request.

        Raises:
            EngineLost: it cannot be reached, or closed before the first byte of its answer.
        """
        connection = await self.connections.get()
        exchange = connection.start(request, for_client=for_client)
        on_sent()
        try:
            await exchange.started
            yield exchange
        except EngineLost as exc:
            if exc.stale:
                self.connections.drop_idle()  # so that the next try is on a new one
            raise
        finally:
            if connection.exchange is exchange:
                connection.abandon()

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of a small answer."""
        headers = (("content-type", "application/json"),) if body else ()
        request = self.request(method, path, headers, body)
        try:
            return await self._answer(request)
        except EngineLost as exc:
            if not exc.stale:
                raise
            return await self._answer(request)

    async def health(self, within_s: float = _ANSWER_S) -> State:
        """Ask for `/health`; "up" only if it answers 200."""
        try:
            async with timeout(within_s):
                status, _ = await self.ask("GET", "/health")
        except EngineLost as exc:
            self.gone |= not exc.asked
            return "down"
        except TimeoutError:
            return "silent"
        return "up" if status == 200 else "down"

    async def _answer(self, request: bytes) -> tuple[int, bytes]:
        async with self.exchange(request) as exchange:
            await exchange.rest()
            return exchange.status, bytes(exchange.held)

    def lost(self) -> None:
        """Note that the engine is gone: it is used again when it answers."""
        if self.state != "down":
            _log.warning("%s does not answer", self.name)
        self.state = "down"
        self.connections.drop_idle()

    def restarted(self) -> None:
        """Note that its process is another one, which holds no blocks for the old one's answers."""
        self.restarts += 1
        self.handoffs -= self.abandoned
        self.abandoned = 0

    @property
    def serves(self) -> bool:
        """Whether it answers and gets requests."""
        return self.state == "up" and not self.drained


class HealthChecker:
    """Asks each engine for its health, again and again."""

    def __init__(self, engines: Sequence[Engine], on_context: Callable[[int], None]) -> None:
        """`on_context` is told how many tokens prompt and answer of an engine may have."""
        self._engines = engines
        self._on_context = on_context
        self.asked = asyncio.Event()
        if not engines:
            self.asked.set()

    async def run(self) -> None:
        """Watch forever; `asked` is set once each engine was asked."""
        await asyncio.gather(*(self.watch(engine) for engine in self._engines))

    async def watch(self, engine: Engine) -> None:
        """Watch one engine forever."""
        missed = 0
        while True:
            # A router that starts on a busy machine would otherwise refuse all requests.
            state = await engine.health(_GREET_S if engine.state == "down" else _ANSWER_S)
            if state == "up" and engine.state == "down" and not await self._greet(engine):
                state = "down"
            if state == "up":
                missed = 0
                engine.state = "up"
            else:
                # Not by the clock: the router itself may have been held up.
                missed += 1
                silent_s = missed * (_EVERY_S + _ANSWER_S)
                self._end_silent(engine, silent_s)
                if state == "down" or silent_s > _SILENT_S:
                    engine.lost()
                elif engine.state == "up":
                    engine.state = "silent"
            engine.asked = True
            if all(one.asked for one in self._engines):
                self.asked.set()
            await asyncio.sleep(_EVERY_S)

    async def _greet(self, engine: Engine) -> bool:
        """Learn an engine's model before clients reach it; warm up one that was restarted.

        Returns:
            Whether it lists its models, as engines do. What only answers `/health` may be another
            program on the port of an engine that died.
        """
        status = 0  # no answer
        try:
            async with timeout(_GREET_S):
                status, body = await engine.ask("GET", "/v1/models")
            models = json.loads(body)["data"]
            name = str(models[0]["id"])
            lengths = (model["max_model_len"] for model in models)  # null for a LoRA adapter
            context = max(int(length) for length in lengths if length is not None)
        except (EngineLost, TimeoutError, *_ODD):
            if not engine.unlisted:
                _log.warning(
                    "%s answers /health, but %s: not used",
                    engine.name,
                    f"/v1/models with {status}" if status >= 400 else "lists no models",
                )
            engine.unlisted = True
            return False
        engine.unlisted = False
        self._on_context(context)
        if engine.gone:
            engine.restarted()
            with suppress(EngineLost, TimeoutError):
                await self._warm_up(engine, name)
        engine.gone = False
        _log.info("%s answers", engine.name)
        return True

    async def _warm_up(self, engine: Engine, model: str) -> None:
        """Send a request of one token, and again if the engine fails on it.

        A model without completions refuses it, which will do: the engine has answered.
        """
        body = json.dumps({"model": model, "prompt": "warm up", "max_tokens": 1}).encode()
        headers = (("content-type", "application/json"),)
        request = engine.request("POST", "/v1/completions", headers, body)
        async with asyncio.timeout(_WARM_UP_S):
            for _ in range(_WARM_UP_TRIES):
                async with engine.exchange(request) as exchange:
                    await exchange.rest()
                    if exchange.status < 500:
                        return

    def _end_silent(self, engine: Engine, silent_s: float) -> None:
        for connection in list(engine.connections.open):
            exchange = connection.exchange
            if exchange is None or silent_s < _SILENT_S:
                continue
            if not exchange.started.done() or silent_s > _LONG_SILENT_S:
                connection.abandon()
