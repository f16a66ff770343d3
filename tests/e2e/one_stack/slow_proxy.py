"""A proxy before the router that makes the stack slower by an exact factor."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
# Pieces of an answer, and the seconds after the request at which each came.
Answer = list[tuple[bytes, float]]


@dataclass
class SlowProxy:
    """Passes answers on as they come; later gives the same ones again at `factor` times the time.

    Those are not asked for anew: another factor of noise, that of the engines between the two,
    would be in the result otherwise.

    Attributes:
        known: the answers to the first load, in the order in which they were asked for.
        served: requests of the load that goes on.
    """

    router_port: int
    port: int = 0
    factor: float = 1.0
    known: list[Answer] = field(default_factory=list)
    served: int = 0

    def slow_down(self, factor: float) -> None:
        """Begin the same requests anew."""
        self.factor, self.served = factor, 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        began, number = clock(), self.served
        self.served += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None
        request = head + await reader.readexactly(int(length[1]))
        if self.factor == 1:
            answer: Answer = []
            async for piece in _answered(self.router_port, request):
                answer.append((piece, clock() - began))
                writer.write(piece)
            self.known.append(answer)
        else:
            for piece, at in self.known[number]:
                await asyncio.sleep(began + self.factor * at - clock())
                writer.write(piece)
        writer.close()


async def _answered(port: int, request: bytes) -> AsyncIterator[bytes]:
    """Yield what comes back, until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    while piece := await reader.read(1 << 16):
        yield piece
    writer.close()


@contextmanager
def slow_proxy(router_port: int) -> Iterator[SlowProxy]:
    """Serve until the block ends."""
    proxy, started = SlowProxy(router_port), threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncio.start_server(proxy.relay, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        started.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
