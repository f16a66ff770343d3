"""Servers that answer what no Redis, and no web server, does: too much, or too slowly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PIECE = bytes(1 << 16)


class Hostile:
    """A server that answers each connection by a function; counts what was taken of it."""

    def __init__(self, answer: Callable[[Hostile, socket.socket], None]) -> None:
        self.sent_bytes = 0
        self.stopped = threading.Event()
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    @property
    def url(self) -> str:
        return f"redis://:password@{self.address}"

    def send(self, taker: socket.socket, data: bytes) -> None:
        taker.sendall(data)
        self.sent_bytes += len(data)

    def close(self) -> None:
        self.stopped.set()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                taker, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(taker,), daemon=True).start()

    def _one(self, taker: socket.socket) -> None:
        with taker:
            try:
                taker.recv(4096)
                self._answer(self, taker)
            except OSError:
                pass  # the other end had enough


@contextmanager
def hostile(answer: Callable[[Hostile, socket.socket], None]) -> Iterator[Hostile]:
    """Serve that until the block ends."""
    server = Hostile(answer)
    try:
        yield server
    finally:
        server.close()


def endless(announced: bytes) -> Callable[[Hostile, socket.socket], None]:
    """Return an answer that goes on, to a limit that no test should reach."""

    def answer(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, announced)
        while server.sent_bytes < 1 << 30 and not server.stopped.is_set():
            server.send(taker, _PIECE)

    return answer


def dripping(every_s: float, count: int) -> Callable[[Hostile, socket.socket], None]:
    """Return an answer of which a byte comes now and then, and then no more."""

    def answer(server: Hostile, taker: socket.socket) -> None:
        for byte in b"+" + b"x" * count:
            server.send(taker, bytes([byte]))
            if server.stopped.wait(every_s):
                return

    return answer
