"""Pages of servers that say too much, too slowly, or something else than HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.runtime import http_get
from deploy.runtime.http_get import get
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
def test_pages(answer: bytes, text: str) -> None:
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
    monkeypatch.setattr(http_get, "_PAGE_BYTES", LIMIT)

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
        HEAD,
        b"",
        b"-ERR unknown command 'GET'\r\n",
    ],
)
def test_what_is_no_whole_page(answer: bytes) -> None:
    with hostile(said(answer)) as server, pytest.raises(ConnectionError):
        get(f"http://{server.address}", "/", timeout_s=20)


def test_a_page_is_whole_before_the_connection_ends() -> None:
    def hold(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, HEAD + b"Content-Length: 4\r\n\r\npage")
        server.stopped.wait(60)

    with hostile(hold) as server:
        assert get(f"http://{server.address}", "/", timeout_s=30).text == "page"


@pytest.mark.parametrize("by_socket", [True, False])
def test_what_is_asked(by_socket: bool, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX if by_socket else socket.AF_INET) as listening:
        listening.bind(str(tmp_path / "s") if by_socket else ("127.0.0.1", 0))
        listening.listen()
        there = "localhost" if by_socket else f"127.0.0.1:{listening.getsockname()[1]}"
        asked: list[bytes] = []

        def answer() -> None:
            taker, _ = listening.accept()
            with taker:
                asked.append(taker.recv(4096))
                taker.sendall(HEAD + b"Content-Length: 0\r\n\r\n")

        serving = threading.Thread(target=answer)
        serving.start()
        url = f"unix://{tmp_path}/s" if by_socket else f"http://{there}"
        assert get(url, "/metrics", timeout_s=20, headers={"Authorization": "Bearer k"}) == (
            200,
            "",
        )
        serving.join()
    expected = f"GET /metrics HTTP/1.1\r\nHost: {there}\r\nConnection: close\r\n"
    assert asked == [f"{expected}Authorization: Bearer k\r\n\r\n".encode()]


@pytest.mark.parametrize("value", ["k\r\nHost: other", "k\nx", "k\rx"])
def test_a_header_that_would_be_several(value: str) -> None:
    with pytest.raises(ValueError, match="several lines"):
        get("http://127.0.0.1:9", "/", timeout_s=20, headers={"Authorization": value})
