"""Ports for the stacks of tests, which run two at a time, and perhaps beside another such run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

from deploy.errors import PortTaken
from deploy.runtime.ports import require_free

FIRST, LAST = 12000, 32000  # below what Linux gives to outgoing connections
SHARE = 2000  # of one process


def free_row() -> int:
    """Return a port with a hundred of this process's own above it, the first twenty free."""
    for base in itertools.islice(_rows(), SHARE // 100):
        with contextlib.suppress(PortTaken):
            require_free({base + i: "x" for i in range(20)}, base=base, host="127.0.0.1")
            return base
    raise AssertionError("no free ports on this machine")


@contextlib.contextmanager
def taken(port: int, host: str = "127.0.0.1") -> Iterator[None]:
    """Listen on a port meanwhile, also where connections of an earlier test still linger on it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        yield


@functools.cache
def _rows() -> Iterator[int]:
    """Return the rows of a share that no other process of tests has, again and again."""
    for first in range(FIRST, LAST, SHARE):
        with contextlib.suppress(OSError):
            # Nobody listens on a row for minutes after it was chosen. This name is free again when
            # its process ends.
            _SHARES.bind(f"\0pdkit-test-ports-{first}")
            return itertools.cycle(range(first, first + SHARE, 100))
    raise AssertionError("ten processes of tests have shared all ports between them")


_SHARES = socket.socket(socket.AF_UNIX)
