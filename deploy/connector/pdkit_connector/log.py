"""The connector's own logger, and the log files of engines, which are bounded.

vLLM and LMCache configure only their own loggers, and both can be set above INFO; these lines are a
contract with whoever greps them, so they bring their own handler.

Services of a stack that runs as processes append to their logs themselves, so a log cannot be
renamed, and what copies and truncates it loses lines. The kernel frees the oldest part in place
instead: offsets stay valid, no line that is kept moves, and no writer waits. Each engine looks at
all logs of its stack on its host: every host has an engine, and one of several may be down.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

NAME = "pdkit_connector"


@cache
def get_logger() -> logging.Logger:
    """Return the logger, writing INFO and above to stderr."""
    logger = logging.getLogger(NAME)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


_HOME = "PDKIT_STACK_HOME"  # set in every process of such a stack
_LIMIT_BYTES = 64 * 2**20
_KEPT_BYTES = 32 * 2**20
_LOOK_S = 5.0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)

# Asked several times a second; an engine's warning would be gone from the last lines of its log.
_POLLED = ("/health", "/metrics")
_OK = 200


def bound_logs(environ: Mapping[str, str] = os.environ) -> None:
    """Watch the stack's logs from now on, where it runs as processes."""
    if home := environ.get(_HOME):
        threading.Thread(target=_watch, args=(Path(home) / "logs",), daemon=True).start()


def leave_out_polls() -> None:
    """Log no request for health or counters that succeeds, as the router and the kit poll both."""
    logging.getLogger("uvicorn.access").addFilter(_is_no_poll)


def _is_no_poll(record: logging.LogRecord) -> bool:
    # uvicorn's arguments: client, method, path, version of HTTP, status.
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    _, method, path, _, status = record.args
    return (method, status) != ("GET", _OK) or str(path).partition("?")[0] not in _POLLED


def free_oldest(log: Path, limit_bytes: int = _LIMIT_BYTES, kept_bytes: int = _KEPT_BYTES) -> None:
    """Free all but the last `kept_bytes` of a log that takes more than `limit_bytes` of the disk.

    Raises:
        OSError: the file system cannot do that.
    """
    with log.open("r+b") as file:
        status = os.fstat(file.fileno())
        oldest = status.st_size - kept_bytes
        if status.st_blocks * 512 <= limit_bytes or oldest <= 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if libc.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, 0, oldest):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _watch(folder: Path) -> None:
    while True:
        for log in folder.glob("*.log"):
            try:
                free_oldest(log)
            except OSError as exc:  # else `deploy` has just removed it, or it will go next time
                if exc.errno == errno.EOPNOTSUPP:
                    warning = "pdkit-connector WARNING the logs in %s grow without limit: %s"
                    get_logger().warning(warning, folder, exc)
                    return
        time.sleep(_LOOK_S)
