"""Process numbers that no other container of the stack has, where PDKIT_PROCESS_NUMBERS names them.

CUDA distinguishes the processes that share GPU memory by their numbers alone: a process cannot open
what one with its own number gave it, and events of both would have one name in shared memory. Each
container counts its processes from 1, so that engines and LMCache's server could have the same.
To share a process namespace instead would show the server's secrets to engines.
"""

from __future__ import annotations

import os
import random
import threading

from pdkit_connector.errors import ConnectorError

NUMBERS_ENV = "PDKIT_PROCESS_NUMBERS"


def take_numbers() -> None:
    """Use numbers up, so that processes started from here on have some of the container's own.

    An engine that starts again begins elsewhere: the server may still know its last number.

    Raises:
        ConnectorError: this kernel's numbers end before them.
    """
    first, last = _own()
    begin = random.randint(first, (first + last) // 2)  # noqa: S311 - no secret
    used = 0
    while used < begin - 1:
        before, used = used, _next()
        if used < before:
            raise ConnectorError(
                f"process numbers end at {before} here, and this container's begin at {first}: "
                "raise kernel.pid_max"
            )


def require_own_number() -> None:
    """Check that this process has one of the container's own numbers.

    Raises:
        ConnectorError: it has not.
    """
    first, last = _own()
    if last and not first <= os.getpid() <= last:
        raise ConnectorError(
            f"this process has the number {os.getpid()}, and {first} to {last} are for its "
            "container: it cannot share GPU memory"
        )


def _own() -> tuple[int, int]:
    first, _, last = os.environ.get(NUMBERS_ENV, "0-0").partition("-")
    return int(first), int(last)


def _next() -> int:
    """Return the number of a thread, which are those of processes, too."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return thread.native_id or 0
