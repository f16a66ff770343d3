"""What a contender does, and how an operation of one is measured."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

MIB = 1 << 20
# One layer of KV of a chunk of 256 tokens with 8 heads of 128 in bfloat16 is 1 MiB.
CHUNK, HEADS, HEAD_SIZE = 256, 8, 128
# Values that are only looked up have a KiB.
TINY_BYTES = 1024
PATIENCE_S = 120.0


@dataclass
class Span:
    """When an operation began and ended (the same clock for all processes), and what it took."""

    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0


@contextlib.contextmanager
def measured() -> Iterator[Span]:
    """Measure what is done inside, on all threads of this process."""
    span = Span()
    before = _cpu_s()
    span.began_s = time.perf_counter()
    yield span
    span.ended_s = time.perf_counter()
    span.cpu_s = _cpu_s() - before


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Where:
    """Where Redis is: a port of 127.0.0.1, and Unix sockets, between `os.pathsep`."""

    port: int
    socket: str


class Contender(Protocol):
    """Moves a prompt of equal values; `engine` tells the processes of a contender apart."""

    def open(self, value_bytes: int, count: int) -> None:
        """Get ready for prompts of `count` values."""

    def store(self) -> Span:
        """Store a prompt; the span ends when all of it is in Redis."""

    def retrieve(self) -> Span:
        """Retrieve the prompt; raise where a byte that is looked at is not what was stored."""

    def lookup(self, count: int) -> Span:
        """Ask which of the first values are there; raise unless all are."""
