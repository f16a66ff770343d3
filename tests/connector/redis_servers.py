"""Real Redis servers for a test, on free ports, ended by their process ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.connector import fair_clock

_START_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(told: Callable[[], Any], within_s: float) -> Any:
    """Return what `told` says once it is true; fail if it is not in time."""
    ends = fair_clock.now() + within_s
    while not (said := told()):
        assert fair_clock.now() < ends, f"not within {within_s} s"
        time.sleep(0.02)
    return said


class Server:
    """One redis-server."""

    def __init__(self, folder: Path, port: int, arguments: tuple[str, ...], tls: dict[str, Any]):
        self.folder = folder
        self.port = port
        self.admin = redis.Redis(
            "127.0.0.1",
            port,
            username="admin",
            password="admin-password",
            retry=Retry(NoBackoff(), 0),
            **tls,
        )
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self, *more: str) -> None:
        """Start, and wait until it answers, if only that it is loading."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ("redis-server", *self._arguments, *more), cwd=self.folder, stdout=log, stderr=log
            )
        eventually(self._answers, _START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            return bool(self.admin.ping())
        except redis.exceptions.BusyLoadingError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def stop_answering(self) -> None:
        self._signal(signal.SIGSTOP)

    def answer_again(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._signal(signal.SIGKILL)
        self._process.wait(10)
        self._process = None

    def close(self) -> None:
        self.admin.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class Servers:
    """The servers of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def start(
        self, *options: str, config: str | None = None, tls: dict[str, Any] | None = None
    ) -> Server:
        """Start a server that keeps nothing on disk; its `admin` may do everything.

        `config` is the text of a configuration file, for a Sentinel. With `tls`, which holds
        arguments of redis-py's, the options must name certificates.
        """
        while True:
            server = self._made(free_port(), options, config, tls)
            self._started.callback(server.close)
            try:
                server.start()
            except AssertionError as exc:
                # Someone took the port before the server did.
                if "Address already in use" not in str(exc):
                    raise
            else:
                return server

    def _made(
        self, port: int, options: tuple[str, ...], config: str | None, tls: dict[str, Any] | None
    ) -> Server:
        folder = self._folder / str(port)
        folder.mkdir()
        where = ("--port", "0", "--tls-port", str(port)) if tls else ("--port", str(port))
        arguments = (*where, "--bind", "127.0.0.1", "--dir", str(folder))
        arguments += ("--user", "admin", "on", ">admin-password", "~*", "&*", "+@all")
        if config is None:
            arguments += ("--save", "", "--appendonly", "no")
        else:
            file = folder / "redis.conf"
            file.write_text(config)
            arguments = (str(file), *arguments)
        return Server(folder, port, (*arguments, *options), tls or {})
