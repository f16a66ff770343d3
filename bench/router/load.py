"""Clients that keep a number of requests open against one address, and time each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True)
class Timing:
    """Seconds of each request, and of all together."""

    each_s: tuple[float, ...]
    whole_s: float

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.each_s)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.each_s) / self.whole_s


class _Client(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(self, request: bytes, stop: list[int], times: list[float]) -> None:
        self._request, self._left, self._times = request, stop, times
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        if self._left[0] <= 0:
            self._transport.close()
            self.ended.set_result(None)
            return
        self._left[0] -= 1
        self._held = b""
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._complete():
            if not self._held.startswith(b"HTTP/1.1 200"):
                self._fail(self._held[:300].decode(errors="replace"))
                return
            self._times.append(time.perf_counter() - self._began)
            self._next()

    def _complete(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._held[:end].lower()
        if b"transfer-encoding: chunked" in head:
            return self._held.endswith(b"0\r\n\r\n")
        at = head.find(b"content-length:")
        return len(self._held) - end - 4 >= int(head[at + 15 :].split(b"\r\n")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(why))


def measure(port: int, *, clients: int, requests: int, stream: bool) -> Timing:
    """Send `requests` in all over `clients` connections; raises ConnectionError if one fails."""
    body = json.dumps(
        {"model": "stand-in", "prompt": "word " * 200, "max_tokens": 32, "stream": stream}
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )
    return uvloop.run(_measure(port, request, clients, requests))


async def _measure(port: int, request: bytes, clients: int, requests: int) -> Timing:
    loop, left, times = asyncio.get_running_loop(), [requests], list[float]()
    began = time.perf_counter()
    opened = [
        await loop.create_connection(lambda: _Client(request, left, times), "127.0.0.1", port)
        for _ in range(clients)
    ]
    await asyncio.gather(*(protocol.ended for _, protocol in opened))
    return Timing(tuple(times), time.perf_counter() - began)
