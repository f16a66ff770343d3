"""Bodies as servers send them: of a known length, up to the end, cut off, or not HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from deploy.benchmark.stream import BadStatus, post

Ask = Callable[[bytes], list[bytes]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Return what asks a server that sends these bytes and hangs up, and returns the events."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(answer: bytes) -> None:
            connection, _ = server.accept()
            with connection:
                while b"BODY" not in connection.recv(65536):
                    pass
                connection.sendall(answer)

        async def events() -> list[bytes]:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            return [event async for event, _ in post(url, "/path", {"X": "y"}, b"BODY")]

        def run(answer: bytes) -> list[bytes]:
            thread = threading.Thread(target=serve, args=(answer,))
            thread.start()
            try:
                return asyncio.run(events())
            finally:
                thread.join()

        yield run


def test_a_body_without_a_length_ends_with_the_connection(ask: Ask) -> None:
    assert ask(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: 2\n\n") == [b"data: 1", b"data: 2"]


def test_an_event_may_span_chunks(ask: Ask) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert ask(head + b"4;x=1\r\ndata\r\n5\r\n: 1\n\n\r\n0\r\n\r\n") == [b"data: 1"]


def test_another_status_is_an_error_with_its_text(ask: Ask) -> None:
    with pytest.raises(BadStatus, match="busy") as caught:
        ask(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata"]
)
def test_an_answer_that_breaks_off_is_an_error(ask: Ask, answer: bytes) -> None:
    with pytest.raises(EOFError):
        ask(answer)


def test_an_answer_that_is_not_http_is_an_error(ask: Ask) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ask(b"SSH-2.0 nonsense\r\n\r\n")
