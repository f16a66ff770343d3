"""A real redis-server for a test, as a user might bring one."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.runtime.host import find_redis_server
from tests.conftest import unused_port

HOST = "127.0.0.1"


@contextmanager
def redis_server(folder: Path, *options: str, config: str = "", port: int = 0) -> Iterator[int]:
    """Run a redis-server that keeps nothing on disk; yields its port.

    `config` is the text of a configuration file, for a Sentinel.
    """
    port = port or unused_port()
    place = folder / f"redis-{port}"
    place.mkdir(exist_ok=True)
    (place / "conf").write_text(config)
    argv = (find_redis_server(None, sys.executable), str(place / "conf"), "--port", str(port))
    argv += ("--bind", HOST, "--dir", str(place), *(() if config else ("--save", "")), *options)
    with (place / "log").open("a") as log:
        server = subprocess.Popen(argv, stdout=log)
    try:
        _wait_until_it_answers(server, port, place / "log")
        yield port
    finally:
        server.kill()
        server.wait()


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait for more than a listening socket: data is read from the disk after that."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 20) as probe:
            probe.sendall(b"PING\r\n")
            if probe.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                return
        time.sleep(0.02)
    raise AssertionError(log.read_text())
