"""GET one page over plain HTTP, without what importing httpx or http.client costs."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploy.runtime.measured_socket import MeasuredSocket

_CONNECT_S = 2.0
_PAGE_BYTES = 16 << 20  # an engine's metrics have some 100 KiB
_PIECE = 1 << 16
_UNIX = "unix://"
_STATUS = re.compile(rb"HTTP/1\.\d (\d{3})\b")


class Page(NamedTuple):
    """The answer to a GET."""

    status: int
    text: str


class _Reader(io.RawIOBase):
    def __init__(self, measured: MeasuredSocket) -> None:
        self._measured = measured

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._measured.recv_into(buffer)


def get(url: str, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Page:
    """Read a page; `url` is `http://HOST:PORT`, or `unix:///PATH` of a socket.

    Proxies are ignored, redirects are not followed.

    Raises:
        OSError: no answer, or one that is not HTTP, is not whole, or has more than 16 MiB;
            TimeoutError if not all of it came within `timeout_s`.
        ValueError: a header of several lines.
    """
    request = _request(url, path, headers or {})
    with closing(_connected(url)) as plain:
        measured = MeasuredSocket(plain, answer_s=timeout_s, answer_bytes=_PAGE_BYTES)
        measured.settimeout(timeout_s)
        plain.sendall(request)
        return _read_page(io.BufferedReader(_Reader(measured)))


def _connected(url: str) -> socket.socket:
    if not url.startswith(_UNIX):
        parts = urlsplit(url)
        return socket.create_connection((parts.hostname or "", parts.port or 80), _CONNECT_S)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(_CONNECT_S)
    try:
        made.connect(url.removeprefix(_UNIX))
    except OSError:
        made.close()
        raise
    return made


def _request(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return a request; the Host of a Unix socket is localhost, as Docker refuses a path there."""
    host = "localhost" if url.startswith(_UNIX) else urlsplit(url).netloc.rpartition("@")[2]
    named = {"Host": host, "Connection": "close", **headers}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    if any({"\r", "\n"} & set(line) for line in lines):
        raise ValueError("a header of several lines")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def _read_page(answer: io.BufferedReader) -> Page:
    status, headers = _head(answer)
    while status == 100:  # Continue
        status, headers = _head(answer)
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body = b"".join(_chunks(answer))
    elif b"content-length" in headers:
        body = _exactly(answer, _number(headers[b"content-length"], 10))
    else:
        body = answer.read()
    return Page(status, body.decode("utf-8", "replace"))


def _head(answer: io.BufferedReader) -> tuple[int, dict[bytes, bytes]]:
    begin = _STATUS.match(answer.readline())
    if begin is None:
        raise ConnectionError("an answer that is not HTTP")
    headers = {}
    while (line := answer.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if not line:
        raise ConnectionError("an answer that breaks off")
    return int(begin[1]), headers


def _chunks(answer: io.BufferedReader) -> Iterator[bytes]:
    while size := _number(answer.readline().partition(b";")[0], 16):
        yield _exactly(answer, size)
        answer.readline()


def _exactly(answer: io.BufferedReader, size: int) -> bytes:
    """Return so many bytes, without reserving memory for what is only announced."""
    pieces, left = [], size
    while left > 0 and (piece := answer.read(min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise ConnectionError("an answer that breaks off")
    return b"".join(pieces)


def _number(text: bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError as exc:
        raise ConnectionError(f"not a length: {text[:20]!r}") from exc
