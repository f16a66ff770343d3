"""Connections to Redis that a hostile or broken server cannot fill or hold up.

redis-py reads what a server announces, however much that is, and waits anew after every byte. Here
the answer to each question is limited in bytes and time. Engines limit theirs in the connector,
which the kit does not import.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

# Limit of each step: to reach the server, TLS, some bytes of an answer.
STEP_S = 2.0
# Limits of the answers to one question; a page of keys has some 100 KiB.
ANSWER_S = 6.0
ANSWER_BYTES = 4 << 20


class MeasuredSocket:
    """A socket that takes so many bytes in so much time after each question, and then fails."""

    def __init__(self, plain_or_tls: Any) -> None:
        self._inner = plain_or_tls
        self._wanted_s: float | None = plain_or_tls.gettimeout()
        self.restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def restart(self) -> None:
        """Begin to measure anew."""
        self._left_bytes = ANSWER_BYTES
        self._until = time.monotonic() + ANSWER_S

    def settimeout(self, seconds: float | None) -> None:
        """Set the limit of each step."""
        self._wanted_s = seconds
        self._inner.settimeout(seconds)

    def recv(self, *args: Any) -> bytes:
        """Receive as a socket does."""
        self._limit()
        data: bytes = self._inner.recv(*args)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        """Receive as a socket does."""
        self._limit()
        count = int(self._inner.recv_into(*args))
        self._count(count)
        return count

    def _limit(self) -> None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no whole answer within {ANSWER_S:g} s")
        self._inner.settimeout(left_s if self._wanted_s is None else min(self._wanted_s, left_s))

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise ConnectionError(f"an answer of more than {ANSWER_BYTES} bytes")


@cache
def bounded(connection_class: type) -> type:
    """Return the class of redis-py's connections with these limits."""

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            return MeasuredSocket(super()._connect())

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self._sock is not None:
                self._sock.restart()
            super().send_packed_command(command, check_health=check_health)

    return Bounded
