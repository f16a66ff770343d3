"""One request over plain HTTP. It costs a tenth of what importing httpx does."""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploy.runtime.measured_socket import MeasuredSocket

_CONNECT_S = 2.0
_PAGE_BYTES = 16 << 20  # an engine's metrics have some 100 KiB
_SOCKET_BYTES = 256 << 20  # Docker's, which has logs of up to 100 MiB
_PIECE = 1 << 16
_UNIX = "unix://"

__all__ = ["HTTPException", "Page", "ask", "get"]


class Page(NamedTuple):
    """The answer to a GET."""

    status: int
    text: str


class _PageSocket(MeasuredSocket):
    """As http.client uses sockets."""

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - it only reads
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """Do nothing: http.client is done with it before the rest of an answer was read."""


class _Reader(io.RawIOBase):
    def __init__(self, measured: MeasuredSocket) -> None:
        self._measured = measured

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._measured.recv_into(buffer)


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket. The Host header is localhost, as Docker refuses a path there."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


def get(url: str, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Page:
    """Read a page, as `ask` does."""
    status, body = ask("GET", url, path, timeout_s=timeout_s, headers=headers)
    return Page(status, body.decode("utf-8", "replace"))


def ask(
    method: str,
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send a request and return status and body of the answer.

    `url` is `http://HOST:PORT`, or `unix:///PATH` of a socket. Proxies are ignored, redirects are
    not followed.

    Raises:
        OSError, HTTPException: no answer; TimeoutError if not all of it came within `timeout_s`;
            one of more than 16 MiB, from a socket 256.
    """
    connection = _connection(url)
    connection.connect()
    with closing(connection.sock) as plain:
        most_bytes = _SOCKET_BYTES if url.startswith(_UNIX) else _PAGE_BYTES
        measured: Any = _PageSocket(plain, answer_s=timeout_s, answer_bytes=most_bytes)
        measured.settimeout(timeout_s)
        connection.sock = measured
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        try:
            data = b"".join(iter(lambda: answer.read(_PIECE), b""))  # never what it only announces
        except (ValueError, OverflowError) as exc:  # http.client takes any number for a length
            raise HTTPException(str(exc)) from exc
        if answer.length:
            raise IncompleteRead(data, answer.length)
        return answer.status, data


def _connection(url: str) -> HTTPConnection:
    if url.startswith(_UNIX):
        return _UnixConnection(url.removeprefix(_UNIX))
    parts = urlsplit(url)
    return HTTPConnection(parts.hostname or "", parts.port, timeout=_CONNECT_S)
