"""Which engines are drained: names in a file that the operator writes, one a line.

A name with a second word is that of a restart: it counts only while a process holds the lock beside
the file, so that a restart which is killed drains nothing forever.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pdkit_router.engines import Engine

_log = logging.getLogger("router")
_EVERY_S = 0.1
_MOST_BYTES = 1 << 20


class Drains:
    """Follows the file. There is no path of this kind over the network."""

    def __init__(self, file: Path, engines: Sequence[Engine]) -> None:
        self._file, self._engines = file, engines

    async def run(self) -> None:
        """Follow it forever."""
        while True:
            self.read()
            await asyncio.sleep(_EVERY_S)

    def read(self) -> None:
        """Drain the engines that the file names, and no others; none without a file."""
        try:
            named = self._named()
        except (OSError, ValueError):
            return  # it stays as it was until the file can be read
        for engine in self._engines:
            if engine.drained != (engine.name in named):
                engine.drained = engine.name in named
                _log.info("%s is %s", engine.name, "drained" if engine.drained else "in use again")

    def _named(self) -> set[str]:
        try:
            with _opened(self._file) as file:
                lines = [line.split() for line in file.read(_MOST_BYTES).decode().splitlines()]
        except FileNotFoundError:
            return set()
        owned = any(len(words) > 1 for words in lines) and self._is_owned()
        return {words[0] for words in lines if len(words) == 1 or (words and owned)}

    def _is_owned(self) -> bool:
        try:
            with _opened(self._file.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file: the reader of a FIFO would hold up every request.

    Raises:
        OSError: it is not there, or is not a regular file.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
