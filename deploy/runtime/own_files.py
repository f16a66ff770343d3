"""Read files that the kit wrote, with suspicion: anything may lie in their place by now."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# Far more than the kit writes into any of them; logs are larger, and are not read whole.
_MOST_BYTES = 16 << 20


@contextmanager
def opened_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for a with block.

    A FIFO would keep its reader waiting, a device may have no end.

    Raises:
        OSError: it is not there, cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a file; `errors` as for `bytes.decode`.

    Raises:
        OSError: as `opened_file`, or it is larger than any file that the kit writes.
        UnicodeDecodeError: it is not UTF-8, and `errors` is "strict".
    """
    with opened_file(path) as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES >> 20} MiB", str(path))
    return found.decode("utf-8", errors)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as `read_text`.
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def remove_other(path: Path) -> None:
    """Remove what lies in a file's place and is no regular file, such as a FIFO or a link.

    Raises:
        OSError: it is a folder that is not empty.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        path.rmdir()
    elif not stat.S_ISREG(mode):
        path.unlink()
