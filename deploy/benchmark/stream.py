"""Server-sent events over plain HTTP/1.1, with little work between the socket and the clock.

A general client spends milliseconds of CPU time on a request. On a busy machine that becomes tens
of milliseconds of TTFT, which the stack did not take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

_ROOM_BYTES = 1 << 24  # of a single event


class BadStatus(Exception):
    """An answer other than 200, with its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def post(
    url: str, path: str, headers: Mapping[str, str], body: bytes
) -> AsyncIterator[tuple[bytes, float]]:
    """Send a request on a new connection, and yield each event and when it was read.

    Raises:
        BadStatus: the answer is not 200.
        OSError, EOFError: there is no answer, or it breaks off.
        ValueError: it is not HTTP.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port or 80, limit=_ROOM_BYTES
    )
    try:
        writer.write(_head(address.netloc, path, headers, len(body)) + body)
        status, fields = _parsed(await reader.readuntil(b"\r\n\r\n"))
        if status != 200:
            text = b"".join([piece async for piece, _ in _pieces(reader, fields)])
            raise BadStatus(status, text.decode("utf-8", "replace"))
        kept = b""
        async for piece, now in _pieces(reader, fields):
            *events, kept = (kept + piece).split(b"\n\n")
            for event in events:
                yield event, now
    finally:
        writer.close()


def _head(host: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode()


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _pieces(
    reader: asyncio.StreamReader, fields: Mapping[str, str]
) -> AsyncIterator[tuple[bytes, float]]:
    """Yield the body as it comes: in chunks, of a known length, or up to the connection's end."""
    if fields.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            piece = await reader.readexactly(size)
            yield piece, time.perf_counter()
            await reader.readexactly(2)
    elif "content-length" in fields:
        piece = await reader.readexactly(int(fields["content-length"]))
        yield piece, time.perf_counter()
    else:
        while piece := await reader.read(1 << 16):
            yield piece, time.perf_counter()
