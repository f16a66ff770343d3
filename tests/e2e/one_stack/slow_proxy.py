"""A proxy before the router that makes the stack slower by an exact factor."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
# How many events of an answer had come, and seconds after the request.
Times = list[tuple[int, float]]


@dataclass
class SlowProxy:
    """Passes answers on, at first as they come; later the same requests at `factor` times the time.

    That time is the one which the request took at first. Another factor of noise, that of the
    engines between the two, would be in the result otherwise.

    Attributes:
        known: of each request of the first load, when its events came.
        served: requests of the load that goes on.
    """

    router_port: int
    port: int = 0
    factor: float = 1.0
    known: list[Times] = field(default_factory=list)
    served: int = 0

    def slow_down(self, factor: float) -> None:
        """Begin the same requests anew."""
        self.factor, self.served = factor, 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        began, number = clock(), self.served
        self.served += 1
        engines, to_router = await asyncio.open_connection("127.0.0.1", self.router_port)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None
        to_router.write(head + await reader.readexactly(int(length[1])))
        times: Times = []
        seen = b""
        while piece := await engines.read(1 << 16):
            seen += piece
            events = seen.count(b"\n\n")
            times.append((events, clock() - began))
            if self.factor != 1:
                due = began + self.factor * _first_time(self.known[number], events)
                await asyncio.sleep(due - clock())
            writer.write(piece)
        if self.factor == 1:
            self.known.append(times)
        to_router.close()
        writer.close()


def _first_time(times: Times, events: int) -> float:
    """Return when so many events had come; at the end, where there were not as many."""
    return next((at for count, at in times if count >= events), times[-1][1])


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
