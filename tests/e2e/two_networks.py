"""Two network namespaces as two hosts, joined by a cable that a test can cut. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Network:
    """A namespace, and the address of its end of the cable."""

    name: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command begins with that shall run in it."""
        return ("nsenter", f"--net={self._file}")

    @property
    def _file(self) -> str:
        return f"/run/netns/{self.name}"

    def connect(self, up: bool) -> None:
        """Plug the cable in, or pull it out."""
        _ip("-n", self.name, "link", "set", "cable", "up" if up else "down")

    def inside(self, call: Callable[[], T]) -> T:
        """Return what a call returns in this namespace, where it may open sockets."""
        with ThreadPoolExecutor(1, initializer=self._join) as thread:
            return thread.submit(call).result()

    def _join(self) -> None:
        """Move the calling thread, and no other, into the namespace."""
        with Path(self._file).open() as namespace:
            if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Make two namespaces with a cable between them, and remove both."""
    one, two = (Network(f"pdkit-{os.getpid()}-{number}", f"10.211.0.{number}") for number in (1, 2))
    try:
        for network in (one, two):
            _ip("netns", "add", network.name)
            _ip("-n", network.name, "link", "set", "lo", "up")
        _ip(
            "link", "add", "cable", "netns", one.name,
            "type", "veth", "peer", "name", "cable", "netns", two.name,
        )  # fmt: skip
        for network in (one, two):
            _ip("-n", network.name, "address", "add", f"{network.address}/24", "dev", "cable")
            network.connect(up=True)
        yield one, two
    finally:
        for network in (one, two):
            subprocess.run(("ip", "netns", "delete", network.name), check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)
