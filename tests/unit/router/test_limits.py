"""What clients can take: connections, time, memory; with limits small enough to meet them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from pdkit_router import serve
from pdkit_router.request import Doorkeeper, Refused, Request
from pdkit_router.serve import ClientLimits, ClientResponse, Clients

from tests.unit.router.stand_in import Loop

Eventually = Callable[..., None]
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENT: dict[str, Any] = {"head_s": 30.0, "body_s": 30.0, "idle_s": 30.0, "stuck_s": 30.0}


@dataclass
class Door:
    """The router's side of clients, with nothing behind it."""

    loop: Loop
    limits: ClientLimits
    served: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients = Clients(self.limits, Doorkeeper(""), self.serve)
        self.go = asyncio.Event()
        self.large = 0
        self._opened: list[socket.socket] = []
        self.server = self.loop.run(self._start())
        self.port = self.server.sockets[0].getsockname()[1]

    async def _start(self) -> asyncio.Server:
        running = asyncio.get_running_loop()
        return await running.create_server(self.clients.connection, "127.0.0.1", 0)

    async def serve(self, request: Request, answer: ClientResponse) -> None:
        self.served.append(request)
        if request.path == "/tokenize":
            await self.go.wait()
        if request.path == "/detokenize":
            answer.begin(200, ())
            paused: list[bool] = []
            answer.on_pause = paused.append
            while not paused:
                answer.piece(b"x" * 65536)
            await self.go.wait()
        answer.whole(200, (), b"{}" + b" " * self.large)

    def connect(self, sent: bytes = b"") -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        self._opened.append(opened)
        opened.sendall(sent)
        return opened

    async def _end(self) -> None:
        self.go.set()
        self.server.close()

    def close(self) -> None:
        self.loop.run(self._end())
        for opened in self._opened:
            opened.close()


@pytest.fixture
def door(loop: Loop) -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def open_door(**limits: Any) -> Door:
        made.append(Door(loop, ClientLimits(**{**PATIENT, **limits})))
        return made[-1]

    yield open_door
    for one in made:
        one.close()


def ended(opened: socket.socket) -> bytes:
    """Return all that comes before the other side ends; fails where it does not."""
    data = b""
    try:
        while piece := opened.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_a_refused_client_is_disconnected_even_if_it_reads_late(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal may fill what the client has not read of the answer before."""
    monkeypatch.setattr(serve, "_LINGER_S", 0.01)
    transport = mock.Mock()
    transport.is_closing.return_value = False

    async def cut_off() -> None:
        made = Clients(ClientLimits(**PATIENT), Doorkeeper(""), mock.Mock()).connection()
        made.connection_made(transport)
        transport.write.side_effect = lambda _: made.pause_writing()
        made.refuse(Refused(400, "no"))
        made.resume_writing()
        while not transport.abort.called:
            await asyncio.sleep(0.005)

    loop.run(asyncio.wait_for(cut_off(), 20))


def test_idle_connections_make_room_for_new_ones(door: Callable[..., Door]) -> None:
    """However many are half open, who asks is answered."""
    made = door(connections=8)
    half_open = [made.connect(b"GET /v1/mod") for _ in range(40)]
    assert made.connect(GET).recv(100).startswith(b"HTTP/1.1 200")
    for opened in half_open[:30]:
        assert ended(opened) == b""
    assert made.clients.open <= 8


def test_connections_with_a_request_are_kept(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door(connections=3)
    busy = [made.connect(GET.replace(b"GET /v1/models", b"POST /tokenize")) for _ in range(3)]
    eventually(lambda: len(made.served) == 3)
    assert ended(made.connect(GET)) == b"", "there is no room"
    made.loop.loop.call_soon_threadsafe(made.go.set)
    for opened in busy:
        assert opened.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"GET /v1/models HTTP/1.1\r\nHost: a", b"G", b"\r\n"])
def test_a_connection_without_a_request_is_closed(door: Callable[..., Door], sent: bytes) -> None:
    said = ended(door(head_s=0.1).connect(sent))
    assert said == b"" or said.startswith(b"HTTP/1.1 408")


def test_an_idle_kept_connection_is_closed(door: Callable[..., Door]) -> None:
    """What begins a request is idle no longer."""
    opened = door(head_s=2).connect(GET)
    assert opened.recv(1000).startswith(b"HTTP/1.1 200")
    opened.sendall(b"GET /v1/mod")
    assert ended(opened).startswith(b"HTTP/1.1 408")


def test_a_slow_head_is_refused(door: Callable[..., Door]) -> None:
    """The limit is for all of it."""
    opened = door(head_s=0.3).connect(b"GET /v1/models HTTP/1.1\r\n")
    sent = 0
    try:
        for sent in range(200):  # noqa: B007
            opened.sendall(b"X-A: b\r\n")
            opened.settimeout(0.02)
            try:
                if opened.recv(100).startswith(b"HTTP/1.1 408"):
                    break
            except TimeoutError:
                pass
    except OSError:
        pass
    assert sent < 199


def test_a_body_that_does_not_arrive_is_refused(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door(body_s=0.1)
    opened = made.connect(
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    )
    assert ended(opened).startswith(b"HTTP/1.1 408")
    eventually(lambda: made.clients.held == 0)
    assert not made.served


def test_an_unused_connection_is_closed(door: Callable[..., Door]) -> None:
    opened = door(idle_s=0.1).connect(GET)
    assert ended(opened).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_no_answer_is_disconnected(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door(stuck_s=0.1)
    made.connect(GET.replace(b"GET /v1/models", b"POST /detokenize"))
    eventually(lambda: made.served)
    eventually(lambda: made.clients.open == 0)
    eventually(lambda: made.clients.busy == 0)


def test_a_client_that_stops_reading_is_disconnected(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    """The request has ended; its connection does as well."""
    made = door(idle_s=0.1, stuck_s=0.1)
    made.large = 2**25
    made.connect(GET)
    eventually(lambda: made.served)
    eventually(lambda: made.clients.open == 0)


def test_a_client_that_reads_no_answer_gets_no_second_one(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door()
    made.large = 2**24
    greedy = made.connect(GET)
    assert greedy.recv(1)
    greedy.sendall(GET)
    made.large = 0
    assert made.connect(GET).recv(100).startswith(b"HTTP/1.1 200")
    assert len(made.served) == 2, "the other client's"
    left = 2**24
    while left > 0:
        left -= len(greedy.recv(2**20))
    eventually(lambda: len(made.served) == 3)


def test_a_connection_that_read_late_and_asks_no_more(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door(idle_s=0.1)
    made.large = 2**24
    opened = made.connect(GET)
    eventually(lambda: made.served)
    assert len(ended(opened)) > 2**24


def test_the_last_of_an_answer_that_nobody_reads(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    """The limit holds for little as for much."""
    made = door(stuck_s=0.1)

    async def nearly_read() -> None:
        connection = made.clients.connection()
        transport = mock.Mock()
        transport.is_closing.return_value = False
        connection.connection_made(transport)
        connection.data_received(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        connection.pause_writing()
        while not transport.close.called:
            await asyncio.sleep(0)
        transport.is_closing.return_value = True
        connection.resume_writing()
        while not transport.abort.called:
            await asyncio.sleep(0.01)
        connection.connection_lost(None)

    made.loop.run(nearly_read())


def test_too_many_requests_are_refused(door: Callable[..., Door], eventually: Eventually) -> None:
    made = door(requests=2)
    for _ in range(2):
        made.connect(GET.replace(b"GET /v1/models", b"POST /tokenize"))
    eventually(lambda: made.clients.busy == 2)
    said = ended(made.connect(GET))
    assert said.startswith(b"HTTP/1.1 429")
    assert b"retry-after: 1" in said


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
NAMED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 600\r\n\r\n"


def chunk(size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b" " * size)


@pytest.mark.parametrize(
    "whole", [NAMED + b" " * 600, CHUNKED + chunk(600) + b"0\r\n\r\n"], ids=["named", "chunked"]
)
def test_too_many_bytes_of_bodies_are_refused(
    door: Callable[..., Door], eventually: Eventually, whole: bytes
) -> None:
    """A body counts until its request is answered."""
    made = door(held_bytes=1000)
    first = made.connect(whole)
    eventually(lambda: made.clients.busy == 1)
    said = ended(made.connect(whole))
    assert said.startswith(b"HTTP/1.1 429")
    assert b"retry-after: 1" in said
    first.close()
    eventually(lambda: made.clients.held == 0)
    made.connect(whole)
    eventually(lambda: made.clients.busy == 1)


def test_a_body_that_is_only_named_takes_no_room(
    door: Callable[..., Door], eventually: Eventually
) -> None:
    made = door(held_bytes=1000)
    for _ in range(5):
        made.connect(NAMED)
    eventually(lambda: made.clients.open == 5)
    made.connect(NAMED + b" " * 600)
    eventually(lambda: made.clients.busy == 1)


@pytest.mark.parametrize("half", [NAMED, CHUNKED], ids=["named", "chunked"])
def test_bodies_that_do_not_end_make_room(
    door: Callable[..., Door], eventually: Eventually, half: bytes
) -> None:
    """All heads are let in before the first body comes."""
    made = door(held_bytes=1000)
    unfinished = [made.connect(half) for _ in range(20)]
    eventually(lambda: made.clients.open == 20)
    for opened in unfinished:
        opened.sendall(chunk(400)[:400])
    for opened in unfinished[:17]:
        assert ended(opened).startswith(b"HTTP/1.1 429")
    assert made.clients.held <= 1000
    made.connect(NAMED + b" " * 600)
    eventually(lambda: made.clients.busy == 1)


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"X-A: b\r\n" * 100_000, b"0\r\nX-A: " + b"b" * 900_000, b"1;" + b"b" * 900_000],
    ids=["trailers", "one trailer", "extension of a chunk"],
)
def test_endless_chunk_extensions_and_trailers_are_refused(
    door: Callable[..., Door], endless: bytes
) -> None:
    made = door()
    opened = made.connect(CHUNKED + chunk(2))
    with contextlib.suppress(OSError):
        for at in range(0, len(endless), 10_000):
            opened.sendall(endless[at : at + 10_000])
    assert ended(opened).startswith(b"HTTP/1.1 431")


def test_trailers_are_not_headers(door: Callable[..., Door], eventually: Eventually) -> None:
    made = door()
    made.connect(CHUNKED + chunk(2) + b"0\r\nx-request-id: forged\r\n\r\n")
    eventually(lambda: made.served)
    assert made.served[0].header("x-request-id") is None


def test_a_client_that_leaves_at_once(door: Callable[..., Door], eventually: Eventually) -> None:
    """Before its request was begun: it counts as one that is being answered no longer."""
    made = door()

    async def leave() -> None:
        connection = made.clients.connection()
        connection.connection_made(mock.Mock())
        connection.data_received(GET)
        connection.connection_lost(None)

    made.loop.run(leave())
    eventually(lambda: made.clients.busy == 0)
    assert (made.served, made.clients.open) == ([], 0)


def test_a_failure_affects_one_request_only(door: Callable[..., Door]) -> None:
    made = door()

    async def broken(request: Request, answer: ClientResponse) -> None:
        raise ZeroDivisionError

    made.clients.serve = broken
    said = made.connect(GET).recv(1000)
    assert said.startswith(b"HTTP/1.1 500")
    assert b"ZeroDivisionError" not in said
    made.clients.serve = made.serve
    assert made.connect(GET).recv(100).startswith(b"HTTP/1.1 200")
