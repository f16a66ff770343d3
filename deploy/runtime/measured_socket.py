"""A socket whose peer can neither fill memory nor block the reader."""

from __future__ import annotations

import time
from typing import Any


class MeasuredSocket:
    """A socket that fails when an answer exceeds its limit of bytes or seconds."""

    def __init__(self, plain_or_tls: Any, *, answer_s: float, answer_bytes: int) -> None:
        self._inner = plain_or_tls
        self._answer_s, self._answer_bytes = answer_s, answer_bytes
        self._wanted_s: float | None = plain_or_tls.gettimeout()
        self.restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def restart(self) -> None:
        """Start counting again, for the next answer."""
        self._left_bytes = self._answer_bytes
        self._until = time.monotonic() + self._answer_s

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
            raise TimeoutError(f"no whole answer within {self._answer_s:g} s")
        self._inner.settimeout(left_s if self._wanted_s is None else min(self._wanted_s, left_s))

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise ConnectionError(f"an answer of more than {self._answer_bytes} bytes")
