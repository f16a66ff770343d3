"""Engines that come and go: found by name, or drained by the operator.

A headless Service of Kubernetes has the addresses of its pods. A pod is among them while it is
ready. One that ends, or that does not answer its probes, leaves them, and gets no new requests;
those that it has go on.

The drain file has the names of drained engines, one a line. A name with a second word is that of a
restart: it counts only while a process holds the lock beside the file, so that a restart that is
killed drains nothing forever.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

from pdkit_router.route import Group
from pdkit_router.upstream import Engine, HealthChecker

_log = logging.getLogger("router")
_RESOLVE_EVERY_S, _READ_EVERY_S = 1.0, 0.1
_MOST_BYTES = 1 << 20  # of the drain file
ROLES = ("producer", "consumer", "engine")

Resolve = Callable[[str, int], Awaitable[Collection[str]]]


@dataclass(frozen=True)
class RoleService:
    """A name that has the addresses of all engines of a role."""

    role: str
    host: str
    port: int


def source(text: str) -> RoleService:
    """Return the source that a text names, as `dns://producer:8000?role=producer`."""
    try:
        parts = urlsplit(text)
        (role,) = parse_qs(parts.query)["role"]
        if parts.scheme == "dns" and parts.hostname and parts.port and role in ROLES:
            return RoleService(role, parts.hostname, parts.port)
    except (ValueError, KeyError):
        pass
    roles = ", ".join(ROLES)
    raise argparse.ArgumentTypeError(f"'{text}' is not dns://HOST:PORT?role=ROLE, one of {roles}")


async def resolved(host: str, port: int) -> Collection[str]:
    """Return the addresses of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port)
    return {str(address[0]) for *_, address in found}


class Discovery:
    """Keeps a group's engines those of a source.

    Attributes:
        asked: set once the engines that were found first were asked for their health.
    """

    def __init__(
        self,
        found_by: RoleService,
        group: Group,
        checker: HealthChecker,
        key: str,
        resolve: Resolve = resolved,
    ) -> None:
        self._source, self._group, self._checker = found_by, group, checker
        self._key, self._resolve = key, resolve
        self._watched: dict[Engine, asyncio.Task[None]] = {}
        self._unknown = False
        self.asked = asyncio.Event()
        group.wanted = True

    async def run(self) -> None:
        """Look forever."""
        while True:
            await self.look()
            if all(engine.asked for engine in self._watched):
                self.asked.set()
            await asyncio.sleep(_RESOLVE_EVERY_S / (1 if self.asked.is_set() else 10))

    async def look(self) -> None:
        """Use the engines that the source has now.

        A name without addresses changes nothing: where it is a fault of DNS, engines serve on, and
        where they are gone, they answer no question for their health.
        """
        for task in self._watched.values():
            if task.done():
                task.result()
        addresses = await self._addresses()
        if not addresses:
            return
        here = {engine.host for engine in self._watched}
        for address in sorted(set(addresses) - here):
            self._add(address)
        for engine in list(self._watched):
            if engine.drained != (engine.host not in addresses):
                engine.drained = not engine.drained
                _log.info("%s %s", engine.name, "leaves" if engine.drained else "is back")
            if engine.drained and not engine.busy:
                self._forget(engine)
        self._group.become(tuple(self._watched))

    async def _addresses(self) -> Collection[str]:
        try:
            found = await self._resolve(self._source.host, self._source.port)
        except OSError as exc:
            if not self._unknown:
                _log.warning("%s: no addresses (%s)", self._source.host, exc)
            self._unknown = True
            return ()
        self._unknown = False
        return found

    def _add(self, address: str) -> None:
        engine = Engine(f"{self._source.role}-{address}", address, self._source.port, key=self._key)
        # One that comes later was restarted: it gets a request of the router's own first.
        engine.gone = self.asked.is_set()
        self._watched[engine] = asyncio.ensure_future(self._checker.watch(engine))
        _log.info("found %s", engine.name)

    def _forget(self, engine: Engine) -> None:
        self._watched.pop(engine).cancel()
        engine.connections.drop_idle()
        _log.info("%s is gone", engine.name)


class Drains:
    """Follows the file. There is no path of this kind over the network."""

    def __init__(self, file: Path, engines: Sequence[Engine]) -> None:
        self._file, self._engines = file, engines

    async def run(self) -> None:
        """Follow it forever."""
        while True:
            self.read()
            await asyncio.sleep(_READ_EVERY_S)

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
