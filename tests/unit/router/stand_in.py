"""An engine that does what a test tells it to, and writes down what reaches it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

EVENTS = [f'data: {{"choices": [{{"text": "{n}"}}]}}\n\n'.encode() for n in range(3)]
DONE = b"data: [DONE]\n\n"
_HEAD = "HTTP/1.1 {} X\r\ncontent-type: {}\r\n"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def close(self) -> None:
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@dataclass
class Seen:
    """A request that came through."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StandIn:
    """One engine. `does` answers each POST; health and models are always answered.

    Attributes:
        frozen: its health is not answered either.
        models, models_status: what it says of its models.
        once: it closes a connection on its second request, as if that had been idle for long.
        left: requests whose client went away before it had an answer.
        go: lets those go on that wait for it.
    """

    loop: Loop
    name: str
    seen: list[Seen] = field(default_factory=list)
    left: int = 0
    healthy: bool = True
    frozen: bool = False
    once: bool = False
    models: bytes = b'{"data": [{"id": "m", "max_model_len": 2048}]}'
    models_status: int = 200

    def __post_init__(self) -> None:
        # Keeps the port while the engine is dead: no other server gets it then, nor a connection.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.loop.run(self._start())
        self.reset()

    def reset(self) -> None:
        self.does: Callable[[StandIn, Connection], Awaitable[None]] = answers
        self.seen.clear()
        self.left, self.healthy = 0, True
        self.go = threading.Event()

    async def _start(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, reuse_port=True
        )

    def start(self) -> None:
        self.loop.run(self._start())

    def kill(self) -> None:
        """Close everything, as the end of a process does."""
        self.loop.run(self._kill())

    async def _kill(self) -> None:
        # What asyncio has accepted and not handed on yet, when a server closes, stays open until it
        # is garbage: nobody would answer there, nor break off. So no more is accepted, first.
        for listening in self._server.sockets:
            self.loop.loop.remove_reader(listening)
        for _ in range(5):
            await asyncio.sleep(0)
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    def drop_idle(self) -> None:
        """Close every connection, as a server does that has waited for long enough."""
        self.loop.run(self._drop())

    async def _drop(self) -> None:
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._one(reader, writer):
                if self.once:
                    await reader.readuntil(b"\r\n\r\n")
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Seen(method, path, headers, body)
        connection = Connection(reader, writer, asked)
        if path == "/health":
            while self.frozen:
                await asyncio.sleep(0.01)
            await connection.whole(200 if self.healthy else 503, b"")
            return True
        self.seen.append(asked)
        if method == "GET":
            await connection.whole(self.models_status, self.models)
            return True
        doing = asyncio.ensure_future(self.does(self, connection))
        while not doing.done():
            if reader.at_eof() or reader.exception():  # what was on its way to it was left unread
                self.left += 1
                doing.cancel()
                return False
            await asyncio.wait({doing}, timeout=0.005)
        await doing
        return not writer.is_closing()

    async def told(self) -> None:
        """Wait until the test says `go`."""
        while not self.go.is_set():
            await asyncio.sleep(0.005)


@dataclass
class Connection:
    """Where one answer goes.

    Attributes:
        asked: what it answers; the last of what the engine has `seen` may be another client's.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: Seen

    async def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        head = _HEAD.format(status, kind) + f"content-length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)

    async def begin(self) -> None:
        head = _HEAD.format(200, "text/event-stream") + "transfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def piece(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


async def answers(engine: StandIn, to: Connection) -> None:
    """Answer as a whole, or in events where that is asked for."""
    if to.asked.json.get("stream"):
        await streams(engine, to)
        return
    usage = {"prompt_tokens_details": {"cached_tokens": 7}}
    await to.whole(200, json.dumps({"by": engine.name, "usage": usage}).encode())


async def streams(engine: StandIn, to: Connection) -> None:
    await to.begin()
    for event in (*EVENTS, DONE):
        await to.piece(event)
    await to.send(b"0\r\n\r\n")


async def waits_between_events(engine: StandIn, to: Connection) -> None:
    await to.begin()
    await to.piece(EVENTS[0])
    await engine.told()
    for event in (*EVENTS[1:], DONE):
        await to.piece(event)
    await to.send(b"0\r\n\r\n")


async def waits(engine: StandIn, to: Connection) -> None:
    await engine.told()
    await answers(engine, to)


async def fails(engine: StandIn, to: Connection) -> None:
    await to.whole(500, b'{"error": {"message": "out of order"}}')


async def fails_for_good(engine: StandIn, to: Connection) -> None:
    """As vLLM's API server does when the core has died, until it ends itself."""
    engine.healthy = False
    await fails(engine, to)


async def refuses(engine: StandIn, to: Connection) -> None:
    await to.whole(400, b'{"error": {"message": "bad temperature"}}')


async def breaks_off(engine: StandIn, to: Connection) -> None:
    to.writer.transport.abort()


async def dies(engine: StandIn, to: Connection) -> None:
    await engine._kill()


async def answers_half(engine: StandIn, to: Connection) -> None:
    await to.send(
        b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    to.writer.transport.abort()


async def streams_half(engine: StandIn, to: Connection) -> None:
    """End in the middle of the second event."""
    await to.begin()
    await to.piece(EVENTS[0] + EVENTS[1][:9])
    await engine.told()
    to.writer.transport.abort()
