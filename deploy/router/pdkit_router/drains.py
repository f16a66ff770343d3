"""Which engines are drained: names in a file that the operator writes, one a line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from pdkit_router.engines import Engine

_log = logging.getLogger("router")
_EVERY_S = 0.1


class Drains:
    """Follows the file. There is no path of this kind over the network."""

    def __init__(self, file: Path, engines: Sequence[Engine]) -> None:
        self._file, self._engines = file, engines

    async def run(self) -> None:
        """Follow it for ever."""
        while True:
            self.read()
            await asyncio.sleep(_EVERY_S)

    def read(self) -> None:
        """Drain the engines that the file names, and no others; none without a file."""
        try:
            named = set(self._file.read_text(encoding="utf-8").split())
        except FileNotFoundError:
            named = set()
        except (OSError, ValueError):
            return  # it stays as it was until the file can be read
        for engine in self._engines:
            if engine.drained != (engine.name in named):
                engine.drained = engine.name in named
                _log.info("%s is %s", engine.name, "drained" if engine.drained else "in use again")
