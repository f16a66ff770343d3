"""New lines of containers' logs."""

from __future__ import annotations

import time
from collections.abc import Callable

from deploy.runtime.compose.containers import FoundContainer
from deploy.runtime.logs import plain


class ContainerReader:
    """Reads what containers write from now on. They are looked up by name, as they come and go."""

    poll_s = 0.5

    def __init__(
        self, find: Callable[[str], FoundContainer | None], names: tuple[str, ...]
    ) -> None:
        self._find = find
        self._since = dict.fromkeys(names, time.time())

    def read(self) -> list[tuple[str, str]]:
        return [(name, line) for name in self._since for line in self._written(name)]

    def _written(self, name: str) -> list[str]:
        container, now = self._find(name), time.time()
        if container is None:
            return []
        text = container.log(since=self._since[name], until=now)
        self._since[name] = now
        return [plain(line) for line in text.splitlines()]
