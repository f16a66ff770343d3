"""Large answers: the router holds little of each, however many clients do not read theirs."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import httptools
import httpx
import pytest
from pdkit_router.resume import pass_on
from pdkit_router.serve import ClientResponse
from pdkit_router.upstream import HELD_BYTES, EngineConnection

from tests.unit.router.conftest import Router, forget_peak, peak
from tests.unit.router.stand_in import Connection, Loop, StandIn

Eventually = Callable[..., None]
CLIENTS, SIZE = 24, 4 * 2**20
LARGE = b'{"by": "an engine", "logprobs": "' + b"7" * SIZE + b'"}'
EVENT = b'data: {"choices": [{"text": "a", "logprobs": "' + b"7" * SIZE + b'"}]}\n\n'
BODY = {"model": "m", "prompt": "x", "logprobs": 20}
COMPLETIONS = "/v1/completions"


async def whole(engine: StandIn, to: Connection) -> None:
    await to.whole(200, LARGE)


async def event(engine: StandIn, to: Connection) -> None:
    if not to.asked.json["stream"]:
        await whole(engine, to)
        return
    await to.begin()
    await to.piece(EVENT)
    await to.send(b"0\r\n\r\n")


async def half(engine: StandIn, to: Connection) -> None:
    if engine.name.startswith("producer"):
        await whole(engine, to)
        return
    stream = bool(to.asked.json.get("stream"))
    kind = "text/event-stream" if stream else "application/json"
    head = f"HTTP/1.1 200 X\r\ncontent-type: {kind}\r\ncontent-length: {2 * SIZE}\r\n\r\n"
    await to.send(head.encode() + (EVENT if stream else LARGE)[: SIZE // 2])
    to.writer.transport.abort()


async def fails_at_length(engine: StandIn, to: Connection) -> None:
    await to.whole(503, b" " * 4 * SIZE)


class Client:
    """A client that sends a request, and reads when it is told to."""

    def __init__(self, port: int, body: Any) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", port))
        content = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
        self.socket.sendall(head.encode() + b"\r\n\r\n" + content)
        self.status = 0
        self._body = bytearray()
        self._done = False

    def begun(self) -> None:
        """Wait for the first byte of the answer."""
        assert self.socket.recv(1, socket.MSG_PEEK)

    def read(self) -> bytes:
        """Return the body; fails if it is not complete."""
        parser = httptools.HttpResponseParser(self)
        while not self._done:
            data = self.socket.recv(2**20)
            assert data, "the answer is not complete"
            parser.feed_data(data)
        self.status = parser.get_status_code()
        return bytes(self._body)

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        self._done = True


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for one in made:
        one.socket.close()


@pytest.mark.parametrize(
    ("does", "asked", "said"),
    [(whole, {}, LARGE), (event, {"stream": True}, EVENT)],
    ids=["whole", "one event of a stream"],
)
def test_memory_does_not_grow_with_the_answer(
    router: Router, clients: list[Client], does: Any, asked: dict[str, Any], said: bytes
) -> None:
    """Of producers' answers nothing is held, of consumers' the beginning."""
    for engine in router.engines:
        engine.does = does
    router.client.post(COMPLETIONS, json={**BODY, **asked})  # what it allocates once, it has then
    before = router.process.memory_info().rss
    forget_peak(router)
    clients += [Client(router.port, {**BODY, **asked}) for _ in range(CLIENTS)]
    for client in clients:
        client.begun()
    for client in clients:
        assert client.read() == said
        assert client.status == 200
    assert peak(router) < before + CLIENTS * SIZE // 4


@pytest.mark.parametrize("asked", [{}, {"stream": True}], ids=["whole", "one event of a stream"])
def test_an_answer_that_breaks_off_is_not_ended_properly(
    router: Router, asked: dict[str, Any]
) -> None:
    """The client knows that, and gets no other answer behind the part that it has."""
    before = router.count("errors")
    for engine in router.engines:
        engine.does = half
    with pytest.raises(httpx.RemoteProtocolError):
        router.client.post(COMPLETIONS, json={**BODY, **asked})
    assert sum(len(consumer.seen) for consumer in router.consumers) == 1
    assert router.count("errors") == before + 1


def test_a_client_without_chunked_encoding_gets_the_answer(
    router: Router, clients: list[Client]
) -> None:
    """HTTP/1.0 has none: the end of the connection is the answer's."""
    for engine in router.engines:
        engine.does = whole
    content = json.dumps(BODY).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(content)}"
    with socket.create_connection(("127.0.0.1", router.port), timeout=30) as opened:
        opened.sendall(head.encode() + b"\r\n\r\n" + content)
        data = b"".join(iter(lambda: opened.recv(2**20), b""))
    assert data.partition(b"\r\n\r\n")[2] == LARGE


def test_an_endless_error_is_cut_off(router: Router) -> None:
    """No engine's failure is that long: it counts as lost."""
    for consumer in router.consumers:
        consumer.does = fails_at_length
    answer = router.client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no engine can answer"


class TestConnectionsOfEngines:
    """A client that reads slowly holds up its own answer, and no other one."""

    @pytest.fixture
    def connection(self) -> EngineConnection:
        connection = EngineConnection(mock.Mock())
        transport = mock.Mock()
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        return connection

    def test_the_next_answer_is_read(self, loop: Loop, connection: EngineConnection) -> None:
        calls = connection.transport.mock_calls  # type: ignore[attr-defined]

        async def last_piece_is_too_much() -> None:
            exchange = connection.start(b"")
            exchange.pass_to(lambda _: exchange.pause(True))
            connection.data_received(b"HTTP/1.1 200 X\r\ncontent-length: 1\r\n\r\n7")
            assert exchange.ended.done()
            said = [call for call in calls if "reading" in str(call)]
            assert said[-2:] == [mock.call.pause_reading(), mock.call.resume_reading()]
            connection.start(b"")
            exchange.pause(True)
            assert calls[-1] != mock.call.pause_reading()

        loop.run(last_piece_is_too_much())

    @pytest.mark.parametrize("unread", [False, True])
    def test_a_slow_client_pauses_the_next_engine(
        self, loop: Loop, connection: EngineConnection, unread: bool
    ) -> None:
        """A stream may continue on another engine while nobody reads what the first one said."""

        async def continues() -> None:
            answer = ClientResponse(mock.Mock(unread=unread), chunked=True)
            passing = asyncio.ensure_future(pass_on(connection.start(b""), (), answer))
            connection.data_received(b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\n")
            await asyncio.sleep(0)
            assert connection._paused is unread
            answer.on_pause(False)
            assert not connection._paused
            passing.cancel()

        loop.run(continues())

    def test_no_more_is_buffered_than_the_limit(
        self, loop: Loop, connection: EngineConnection
    ) -> None:
        calls = connection.transport.mock_calls  # type: ignore[attr-defined]

        async def full() -> None:
            exchange = connection.start(b"", for_client=True)
            waiting = asyncio.ensure_future(exchange.beginning())
            connection.data_received(b"HTTP/1.1 200 X\r\ncontent-length: 999999\r\n\r\n")
            connection.data_received(b"7" * (HELD_BYTES - 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            connection.data_received(b"7")
            assert calls[-1] == mock.call.pause_reading()
            assert not connection.is_awaited, "a slow client is not the engine's fault"
            await waiting
            await exchange.beginning()
            exchange.pass_to(lambda _: None)
            assert calls[-1] == mock.call.resume_reading()
            assert connection.is_awaited
            connection.abandon()
            assert not connection.is_awaited

        loop.run(full())

    def test_answers_for_the_router_are_read_whole(
        self, loop: Loop, connection: EngineConnection
    ) -> None:
        async def rest() -> None:
            exchange = connection.start(b"")
            head = b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % (3 * HELD_BYTES)
            connection.data_received(head + b"7" * HELD_BYTES)
            waiting = asyncio.ensure_future(exchange.rest())
            await asyncio.sleep(0)
            connection.data_received(b"7" * HELD_BYTES)
            assert not connection._paused
            connection.data_received(b"7" * HELD_BYTES)
            await waiting
            assert len(exchange.held) == 3 * HELD_BYTES

        loop.run(rest())
