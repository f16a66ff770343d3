"""One lock a stack: two commands never change the same stack at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from deploy.errors import StackLocked


@contextmanager
def stack_lock(path: Path, name: str) -> Iterator[None]:
    """Hold the stack's lock, and leave no file behind.

    Raises:
        StackLocked: another command holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as exc:
        raise StackLocked(
            f"another deploy command is changing the stack '{name}'",
            hint=f"wait for it to end, then run: deploy status --name {name}",
        ) from exc
    try:
        yield
    finally:
        # Removed while still held, so that nobody finds the file free and then loses it.
        path.unlink(missing_ok=True)
        lock.release()
