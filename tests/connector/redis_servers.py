"""Real Redis servers for a test, on free ports, ended by their process ids."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.redis_server import HOST, RedisServer
from tests.connector import fair_clock


def eventually(told: Callable[[], Any], within_s: float) -> Any:
    """Return what `told` says once it is true; fail if it is not in time."""
    ends = fair_clock.now() + within_s
    while not (said := told()):
        assert fair_clock.now() < ends, f"not within {within_s} s"
        time.sleep(0.02)
    return said


class Server(RedisServer):
    """One redis-server, whose `admin` may do everything.

    With `tls`, which holds arguments of redis-py's, the options must name certificates.
    """

    def __init__(
        self, folder: Path, *options: str, config: str = "", tls: dict[str, Any] | None = None
    ) -> None:
        user = ("--user", "admin", "on", ">admin-password", "~*", "&*", "+@all")
        super().__init__(folder, *user, *options, config=config, tls=bool(tls))
        self._of_client = tls or {}

    @cached_property
    def admin(self) -> redis.Redis:
        return redis.Redis(
            HOST, self.port, username="admin", password="admin-password",
            retry=Retry(NoBackoff(), 0), **self._of_client,
        )  # fmt: skip

    def is_up(self, answer: str) -> bool:
        """Also while it loads."""
        return bool(answer)

    def stop_answering(self) -> None:
        self._signal(signal.SIGSTOP)

    def answer_again(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.admin.close()
        self.kill()

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


class Servers:
    """The servers of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def start(self, *options: str, config: str = "", tls: dict[str, Any] | None = None) -> Server:
        server = Server(self._folder, *options, config=config, tls=tls)
        self._started.callback(server.close)
        server.start()
        return server
