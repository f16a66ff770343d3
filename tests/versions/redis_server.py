"""A real Redis on a free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator

import redis

START_S = 60
TRIES = 5


@contextlib.contextmanager
def redis_server(*arguments: str) -> Iterator[int]:
    """Run redis-server until the block ends; give its port."""
    server, port = _started(arguments)
    try:
        yield port
    finally:
        server.kill()
        server.wait()


def _started(arguments: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server that answers; on another port where someone else took the first one."""
    for _ in range(TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        where = ("--port", str(port), "--bind", "127.0.0.1")
        server = subprocess.Popen(("redis-server", *arguments, *where), stdout=subprocess.DEVNULL)
        if _answers(server, port):
            return server, port
    raise RuntimeError(f"redis-server ended {TRIES} times, with {server.returncode}")


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; return False where it ended."""
    ends = time.monotonic() + START_S
    with redis.Redis(port=port) as client:
        while server.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(redis.RedisError):
                if client.info("server")["process_id"] == server.pid:
                    return True
            time.sleep(0.01)
    server.kill()
    server.wait()
    return False
