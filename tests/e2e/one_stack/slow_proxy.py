"""A proxy before the router that gives a stack's answers again, slower by an exact factor."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.e2e.conftest import eventually

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
# Of a stack with the factor 1: the first token of the longest request, and each that follows.
LONGEST_S, EVENT_S = 0.3, 0.02


@dataclass
class SlowProxy:
    """Passes answers on as they come; later gives the same ones again, at times of its own.

    A first token takes as long as its request is. The engines' own times would bring the noise of
    the machine into a factor that is to be known exactly.

    Attributes:
        factor: the stack's time over that of the fastest; 0 while answers are passed on.
        known: for each request of the first load, its bytes and the events of its answer.
        served: requests of the load that goes on.
        relaying: what is under way; asyncio forgets the task of a client that has left.
    """

    router_port: int
    port: int = 0
    factor: float = 0.0
    known: list[tuple[int, list[bytes]]] = field(default_factory=list)
    served: int = 0
    relaying: set[asyncio.Task[None]] = field(default_factory=set)

    def again(self, factor: float) -> None:
        """Begin the same requests anew, once the last answer is known up to its end."""
        assert eventually(lambda: not self.relaying)
        self.factor, self.served = factor, 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection until its answer ends, also where its client leaves first."""
        task = asyncio.ensure_future(self._relay(reader, writer))
        self.relaying.add(task)
        task.add_done_callback(self.relaying.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        began, number = clock(), self.served
        self.served += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None
        request = head + await reader.readexactly(int(length[1]))
        if not self.factor:
            answer, events = b"", list[bytes]()
            self.known.append((len(request), events))
            async for piece in _answered(self.router_port, request):
                answer += piece
                writer.write(piece)
            events += re.split(rb"(?<=\n\n)", answer)
        else:
            size, events = self.known[number]
            first_s = LONGEST_S * size / max(size for size, _ in self.known)
            for behind, event in enumerate(events):
                due = began + self.factor * (first_s + behind * EVENT_S)
                await asyncio.sleep(due - clock())
                writer.write(event)


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
        server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
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
