"""A Redis of the benchmark's own, and the processor time that it takes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.kit import cpu_s


@dataclass(frozen=True)
class Server:
    """A running redis-server without persistence, at a port and at a socket."""

    port: int
    socket: str
    pid: int

    def cpu_s(self) -> float:
        """Return the seconds that its threads have run so far."""
        return cpu_s(self.pid)

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

    def ask(self, command: str) -> str:
        """Return the first bytes of an answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(1 << 16).decode()


@contextlib.contextmanager
def redis_server(max_memory_mib: int, *options: str) -> Iterator[Server]:
    """Run a Redis, with further options, until the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        at = f"{folder}/redis.sock"
        argv = (
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", at,
            "--save", "", "--appendonly", "no", "--maxmemory", f"{max_memory_mib}mb",
            "--maxmemory-policy", "allkeys-lru", *options,
        )  # fmt: skip
        process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            server = Server(port, at, process.pid)
            _await(server)
            yield server
        finally:
            process.terminate()
            process.wait()


def _await(server: Server) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            server.ask("PING")
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
