"""One lock per stack, so that two commands never change it at once.

The supervisor has a second lock, which it holds only while it starts a service. A command takes the
first lock, then waits for the second; the supervisor gives up if the first one is held.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from deploy.errors import MachineError, PdkitError, StackLocked
from deploy.runtime.own_files import remove_other

_PLANNING_S = 60.0
# Testing a lock takes it for a moment, which must not make another command fail.
_MOMENT_S = 0.2
_POLL_S = 0.02
_TURN_S = 30.0


def is_locked(path: Path) -> bool:
    """Tell whether a command holds the lock of a stack."""
    if not path.is_file() or path.is_symlink():
        return False  # nobody can hold anything else
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        return True
    lock.release()
    return False


@contextmanager
def planning_lock(path: Path) -> Iterator[None]:
    """Hold the lock of all stacks, while GPUs and ports are chosen for one.

    Raises:
        StackLocked: another command has been planning for a minute.
    """
    refusal = StackLocked(
        "another deploy command has held the lock for GPUs and ports for a minute",
        hint="wait for it to end, then run the command again",
    )
    with held(path, refusal, within_s=_PLANNING_S):
        yield


@contextmanager
def bench_lock(path: Path) -> Iterator[None]:
    """Hold the lock of all benchmarks of this user: each would slow down the other.

    Raises:
        StackLocked: another one runs.
    """
    refusal = StackLocked(
        "another deploy bench is running, and each would slow down the other",
        hint="wait for it to end, then run the command again",
    )
    with held(path, refusal):
        yield


@contextmanager
def stack_lock(path: Path, name: str) -> Iterator[None]:
    """Hold the stack's lock, and leave no file behind.

    Raises:
        StackLocked: another command holds it, for more than a moment.
    """
    refusal = StackLocked(
        f"another deploy command is changing the stack '{name}'",
        hint=f"wait for it to end, then run: deploy status --name {name}",
    )
    with held(path, refusal), held(_turn(path), refusal, within_s=_TURN_S):
        yield


@contextmanager
def supervisor_turn(path: Path, name: str) -> Iterator[None]:
    """Hold a stack's lock as its supervisor, which steps back for commands.

    Raises:
        StackLocked: a command is changing the stack.
    """
    refusal = StackLocked(f"a deploy command is changing the stack '{name}'")
    with held(_turn(path), refusal):
        if is_locked(path):
            raise refusal
        yield


def _turn(path: Path) -> Path:
    return path.with_suffix(".turn")


@contextmanager
def held(
    path: Path, refusal: PdkitError, *, within_s: float = _MOMENT_S, mode: int = -1
) -> Iterator[None]:
    """Hold the lock of a file, which is gone afterwards; raise `refusal` if another one holds it.

    Args:
        within_s: how long to wait for it.
        mode: the file's rights; by default, as the umask has it.

    Raises:
        MachineError: a folder with files in it lies in the lock's place.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        remove_other(path)
    except OSError as exc:
        raise MachineError(
            f"{path} should be a lock file, but is a folder",
            hint=f"rm -r {shlex.quote(str(path))}, then run the command again",
        ) from exc
    lock = filelock.FileLock(path, timeout=within_s, mode=mode)
    try:
        lock.acquire(poll_interval=_POLL_S)
    except filelock.Timeout as exc:
        raise refusal from exc
    try:
        yield
    finally:
        # Removed while still held, so that nobody finds the file free and then loses it.
        path.unlink(missing_ok=True)
        lock.release()
