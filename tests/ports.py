"""Ports for the stacks of tests, which run two at a time."""

from __future__ import annotations

import contextlib
import itertools
import os

from deploy.errors import PortTaken
from deploy.runtime.ports import require_free

FIRST, LAST = 12000, 32000  # below what Linux gives to outgoing connections
SHARE = 5000  # of one worker
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

_START = FIRST + WORKER * SHARE % (LAST - FIRST)
_ROWS = itertools.cycle(range(_START, _START + SHARE, 100))


def free_row() -> int:
    """Return a port with a hundred of this worker's own above it, the first twenty free."""
    for base in itertools.islice(_ROWS, SHARE // 100):
        with contextlib.suppress(PortTaken):
            require_free({base + i: "x" for i in range(20)}, base=base, host="127.0.0.1", stack="x")
            return base
    raise AssertionError("no free ports on this machine")
