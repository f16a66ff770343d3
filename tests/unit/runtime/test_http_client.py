"""Pages of servers that say too much, too slowly, or something else than HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from deploy.runtime import http_client
from deploy.runtime.http_client import get
from tests.hostile_redis import Hostile, hostile

LIMIT = 200_000
# What sockets hold beside what was read from them.
BUFFERS = 16 << 20


def said(text: bytes) -> Callable[[Hostile, socket.socket], None]:
    return lambda server, taker: server.send(taker, text)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (HEAD + b"Content-Length: 4\r\n\r\npage", "page"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\npa\r\n2\r\nge\r\n0\r\n\r\n", "page"),
        (HEAD + b"\r\npage", "page"),
        (HEAD + b"Content-Length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n\xffpage", "\ufffdpage"),
    ],
)
def test_complete_pages_are_read(answer: bytes, text: str) -> None:
    with hostile(said(answer)) as server:
        assert get(f"http://{server.address}", "/", timeout_s=20) == (200, text)


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (HEAD + b"\r\n", b"x" * 65536),
        (HEAD + b"Content-Length: 99000000000\r\n\r\n", b"x" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFF\r\n", b"x" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 9999),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
        (HEAD, b"X: " + b"y" * 60_000 + b"\r\n"),
    ],
    ids=["to the end", "named", "one chunk", "chunks", "not yet", "headers"],
)
def test_an_endless_page_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, again: bytes
) -> None:
    monkeypatch.setattr(http_client, "_PAGE_BYTES", LIMIT)

    def endless(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, begin)
        while server.sent_bytes < 4 * BUFFERS:
            server.send(taker, again)

    with hostile(endless) as server, pytest.raises(OSError):
        get(f"http://{server.address}", "/", timeout_s=20)
    assert server.sent_bytes < LIMIT + BUFFERS


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + b"\r\n"], ids=["line", "head", "body"])
def test_a_page_byte_by_byte_ends(begin: bytes) -> None:
    """Each byte comes in time, and all of them do not."""

    def drip(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, begin)
        for _ in range(500):
            if server.stopped.wait(0.01):
                return
            server.send(taker, b"x")

    with hostile(drip) as server, pytest.raises(TimeoutError):
        get(f"http://{server.address}", "/", timeout_s=0.5)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Length: 99\r\n\r\npage",
        HEAD + b"Content-Length: 99000000000000\r\n\r\npage",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFF\r\npage",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-2\r\npage",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-" + b"F" * 17 + b"\r\npage",
        b"",
        b"-ERR unknown command 'GET'\r\n",
    ],
)
def test_incomplete_pages_are_errors(answer: bytes) -> None:
    with hostile(said(answer)) as server, pytest.raises(OSError):
        get(f"http://{server.address}", "/", timeout_s=20)
