"""Ports for the stacks of tests, which run two at a time, and perhaps beside another such run.

Imports nothing of the kit by itself, as tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

FIRST, LAST = 12000, 32500  # below what Linux gives to outgoing connections
SHARE = 500  # of one process: rows of a hundred, and a hundred single ports
ROWS = SHARE - 100


def free_row() -> int:
    """Return a port with a hundred of this process's own above it, the first twenty free."""
    from deploy.errors import PortTaken
    from deploy.runtime.ports import require_free

    for base in itertools.islice(_rows(), ROWS // 100):
        with contextlib.suppress(PortTaken):
            require_free({base + i: "x" for i in range(20)}, base=base, host="127.0.0.1")
            return base
    raise AssertionError("no free ports on this machine")


def unused_port() -> int:
    """Return a single port of this process's own, of the loopback address, without a listener.

    A client that tries a port of those that the kernel gives to outgoing connections again and
    again, until a server is there, may be connected with itself and be in its way.
    """
    for port in itertools.islice(_singles(), SHARE - ROWS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("this process of tests has all its single ports in use")


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
    """Return the rows of this process's share, again and again."""
    return itertools.cycle(_own()[:ROWS:100])


@functools.cache
def _singles() -> Iterator[int]:
    """Return the single ports of this process's share, again and again."""
    return itertools.cycle(_own()[ROWS:])


def _own() -> range:
    """Return the ports of this process's share."""
    first = FIRST + _share() * SHARE
    return range(first, first + SHARE)


@functools.cache
def _share() -> int:
    """Return the number of a share of all ports that no other process of tests has."""
    for number in range(_SHARE_COUNT):
        with contextlib.suppress(OSError):
            # Nobody listens on a row for minutes after it was chosen. This name is free again when
            # its process ends.
            _SHARES.bind(f"\0pdkit-test-ports-{number}")
            return number
    raise AssertionError("other processes of tests have shared all ports between them")


_SHARE_COUNT = (LAST - FIRST) // SHARE
_SHARES = socket.socket(socket.AF_UNIX)
