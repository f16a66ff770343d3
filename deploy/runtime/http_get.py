"""GET one page over plain HTTP. It costs a tenth of what importing httpx does."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

_CONNECT_S = 2.0
_UNIX = "unix://"

__all__ = ["HTTPException", "Page", "get"]


class Page(NamedTuple):
    """The answer to a GET."""

    status: int
    text: str


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket. Docker refuses a path in the place of the host."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(url: str, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Page:
    """Read a page; `url` is `http://HOST:PORT`, or `unix:///PATH` of a socket.

    Proxies are ignored, redirects are not followed.

    Raises:
        OSError, HTTPException: no answer; TimeoutError if not within `timeout_s` per step.
    """
    connection = _connection(url)
    try:
        connection.connect()
        connection.sock.settimeout(timeout_s)
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Page(answer.status, answer.read().decode("utf-8", "replace"))
    finally:
        connection.close()


def _connection(url: str) -> HTTPConnection:
    if url.startswith(_UNIX):
        return _UnixConnection(url.removeprefix(_UNIX))
    parts = urlsplit(url)
    return HTTPConnection(parts.hostname or "", parts.port, timeout=_CONNECT_S)
