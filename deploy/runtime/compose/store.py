"""Redis in a container that no port of this machine leads to: asked from inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy.runtime.store import StoreStats, stats_from
from deploy.stack.layout import SECRETS

# The password goes from its file to redis-cli's input: arguments and environments could be seen.
_LOG_IN = f"printf 'AUTH '; cat {SECRETS}/redis_password"


class ContainerStore:
    """A stack's Redis, by `redis-cli` in its container; None is one that does not run."""

    def __init__(self, container: Any | None) -> None:
        self._container = container

    def ping(self) -> bool:
        return self._ask("PING").split() == ["OK", "PONG"]

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        answer = self._ask("INFO", "INFO commandstats", "DBSIZE")
        values: dict[str, Any] = {}
        keys = None
        for line in answer.splitlines():
            name, colon, value = line.strip().partition(":")
            if colon:
                values[name] = value
            elif name.isdigit():
                keys = int(name)
        try:
            return stats_from(values, _calls(values), keys) if keys is not None else None
        except (KeyError, ValueError):
            return None

    def close(self) -> None:
        """Do nothing: every question is a command of its own."""

    def _ask(self, *commands: str) -> str:
        """Return what Redis answers to the password and to commands, "" if it does not."""
        from docker.errors import DockerException
        from requests import RequestException

        if self._container is None:
            return ""
        lines = "\\n".join(commands)
        try:
            code, output = self._container.exec_run(
                ("sh", "-c", f"{{ {_LOG_IN}; printf '{lines}\\n'; }} | redis-cli")
            )
        except (DockerException, RequestException):
            return ""
        return output.decode("utf-8", "replace") if code == 0 else ""


def _calls(values: dict[str, Any]) -> dict[str, int]:
    """Return command → calls from lines such as 'cmdstat_get:calls=3,usec=…'."""
    return {
        name.removeprefix("cmdstat_"): int(value.partition("calls=")[2].partition(",")[0])
        for name, value in values.items()
        if name.startswith("cmdstat_")
    }


@contextmanager
def open_container_store(container: Any | None) -> Iterator[ContainerStore]:
    yield ContainerStore(container)
