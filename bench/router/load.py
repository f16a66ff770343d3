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


class Client(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._answered: asyncio.Future[float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self) -> asyncio.Future[float]:
        """Send it; the result is the seconds until all of the answer came, or ConnectionError."""
        self._held = b""
        self._answered = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self._transport.write(self._request)
        return self._answered

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._complete():
            if not self._held.startswith(b"HTTP/1.1 200"):
                self._fail(self._held[:300].decode(errors="replace"))
            elif self._answered and not self._answered.done():
                self._answered.set_result(time.perf_counter() - self._began)

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
        if self._answered and not self._answered.done():
            self._answered.set_exception(ConnectionError(why))


async def connected(port: int, clients: int, *, stream: bool) -> list[Client]:
    """Return clients of an address that ask for a completion, as a stream or whole."""
    body = json.dumps(
        {"model": "stand-in", "prompt": "word " * 200, "max_tokens": 32, "stream": stream}
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        for _ in range(clients)
    ]
    return [client for _, client in opened]


def measure(port: int, *, clients: int, requests: int, stream: bool) -> Timing:
    """Send `requests` in all over `clients` connections; raises ConnectionError if one fails."""
    return uvloop.run(_measure(port, clients, requests, stream))


async def _measure(port: int, clients: int, requests: int, stream: bool) -> Timing:
    left, times = iter(range(requests)), list[float]()
    began = time.perf_counter()

    async def asks(client: Client) -> None:
        for _ in left:  # which all clients share
            times.append(await client.ask())
        client.close()

    await asyncio.gather(*map(asks, await connected(port, clients, stream=stream)))
    return Timing(tuple(times), time.perf_counter() - began)
