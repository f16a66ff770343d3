"""The router's side of clients: bytes that no HTTP client sends, at the real connection."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import httptools

from tests.fuzz.mutations import mutated

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "router"))

from pdkit_router.request import METHODS, OWN, Doorkeeper, Request
from pdkit_router.serve import ClientConnection, ClientLimits, ClientResponse, Clients

KEY = "0123456789abcdef" * 2
_BODY_BYTES = 256
_HEAD = "host: 127.0.0.1\r\nauthorization: Bearer " + KEY + "\r\n"
_BODY = b'{"model": "tiny", "prompt": [1, 2, 3], "stream": true}'
_PIECE = b"data: x\n\n"
_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)


def _post(path: str, headers: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\n{_HEAD}{headers}\r\n".encode() + body


_LENGTH = f"content-length: {len(_BODY)}\r\n"
_REQUESTS = (
    _post("/v1/completions", _LENGTH, _BODY),
    _post("/v1/chat/completions?a=b", "transfer-encoding: chunked\r\n", _CHUNKED),
    _post("/v1/completions", "transfer-encoding: chunked\r\nexpect: 100-continue\r\n",
          _CHUNKED[:-2] + b"trailer: x\r\n\r\n"),
    _post("/v1/completions", _LENGTH + "transfer-encoding: chunked\r\n", _CHUNKED),
    _post("/v1/completions", _LENGTH + _LENGTH, _BODY),
    _post("/v1/completions", "content-length: 400\r\n", b"x" * 400),
    _post("/remove_worker?url=x", "content-length: 0\r\n", b""),
    _post("/v1/completions", "content-encoding: gzip\r\n" + _LENGTH, _BODY),
    f"GET /v1/models HTTP/1.1\r\n{_HEAD}\r\n".encode(),
    f"GET http://127.0.0.1/v1/models HTTP/1.1\r\n{_HEAD}\r\n".encode(),
    f"GET /v1/models HTTP/1.0\r\n{_HEAD}\r\n".encode(),
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\n\r\n",
    f"GET /v1/models HTTP/1.1\r\n{_HEAD}origin: http://evil\r\n\r\n".encode(),
    f"GET /v1/models HTTP/1.1\r\n{_HEAD}upgrade: h2c\r\nconnection: upgrade\r\n\r\n".encode(),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip


class _Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing, "written behind the end"
        self.written += data

    def write_eof(self) -> None:
        """Do nothing: the client reads to the end."""

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""


class _Answers:
    """Reads answers as a client does."""

    def __init__(self, written: bytes) -> None:
        self.statuses: list[int] = []
        self.whole = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(written)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_message_complete(self) -> None:
        self.whole += 1


def front_streams(rng: random.Random, rounds: int) -> Counter[str]:
    """Send broken requests: each answer is one, and what comes through was let in by the rules."""
    return asyncio.run(_front_streams(rng, rounds))


async def _front_streams(rng: random.Random, rounds: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    served: list[Request] = []

    async def serve(request: Request, answer: ClientResponse) -> None:
        served.append(request)
        if rng.randrange(2):
            answer.whole(200, (), b"{}")
            return
        answer.begin(200, (("content-type", "text/event-stream"),))
        answer.piece(_PIECE)
        answer.end()

    clients = Clients(ClientLimits(body_bytes=_BODY_BYTES), Doorkeeper(KEY), serve)
    for _ in range(rounds):
        served.clear()
        requests = [rng.choice(_REQUESTS) for _ in range(rng.randint(1, 3))]
        broken = [mutated(one, rng) if rng.randrange(4) else one for one in requests]
        wire = await _sent(clients.connection(), broken, rng)
        assert (clients.open, clients.busy, clients.held, len(clients.waiting)) == (0, 0, 0, 0)
        for request in served:
            _require_let_in(request)
        answers = _Answers(bytes(wire.written))
        # A stream of HTTP/1.0 ends with its connection.
        unframed = wire.closing and wire.written.endswith(_PIECE)
        assert answers.whole + unframed == len(answers.statuses), bytes(wire.written)
        assert answers.statuses.count(200) == len(served), answers.statuses
        for status in answers.statuses:
            assert status in (100, 200, 501) or 400 <= status < 500, status
            seen[str(status)] += 1
        seen["no answer"] += not answers.statuses
    return seen


async def _sent(connection: ClientConnection, requests: list[bytes], rng: random.Random) -> _Wire:
    """Send requests in pieces, some of them before the last one was answered; then hang up."""
    wire = _Wire()
    connection.connection_made(wire)
    for data in requests:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            if not wire.closing:
                connection.data_received(data[start:end])
        if rng.randrange(4):
            await asyncio.sleep(0)  # so that it is answered
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return wire


def _require_let_in(request: Request) -> None:
    path = request.target.partition("?")[0]
    assert METHODS.get(path) == request.method, request
    named = [value for name, value in request.headers if name == "authorization"]
    assert path in OWN or named == [f"Bearer {KEY}"], request
    assert len(request.body) <= _BODY_BYTES, request
    assert not any(name == "origin" for name, _ in request.headers), request
