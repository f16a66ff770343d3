"""A Redis of the benchmark's own, and the processor time that it takes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.kit import cpu_s
from bench.redis_server import RedisServer


class Server(RedisServer):
    """A running redis-server without persistence, at a port and at a socket."""

    def cpu_s(self) -> float:
        """Return the seconds that its threads have run so far."""
        assert self.process is not None  # noqa: S101 - for mypy
        return cpu_s(self.process.pid)

    def flush(self) -> None:
        """Delete everything, and return when that is done."""
        self.ask("FLUSHALL SYNC")

    def version(self) -> str:
        """Return Redis' version."""
        info = self.ask("INFO server")
        return next(
            line.partition(":")[2].strip()
            for line in info.splitlines()
            if line.startswith("redis_version")
        )


@contextlib.contextmanager
def redis_server(max_memory_mib: int, *options: str) -> Iterator[Server]:
    """Run a Redis, with further options, until the context ends."""
    limits = ("--maxmemory", f"{max_memory_mib}mb", "--maxmemory-policy", "allkeys-lru")
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), *limits, *options) as server:
        yield server
