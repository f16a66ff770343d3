"""The file with the drained engines, which the router reads again whenever it changes.

A line is the name of an engine. `deploy restart` and `deploy swap` add their process id: such a
line counts only while that command holds a lock beside the file, which the kernel takes from it
however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import StateError
from deploy.runtime.own_files import opened_file, read_text

BY_PERSON = "deploy drain"
_BY_COMMAND = "restart:"
_LOCK_S = 10.0


def drained_engines(file: Path) -> Mapping[str, str]:
    """Return engine → by what it is drained; nothing if there is no file.

    Raises:
        StateError: it is there and cannot be read.
    """
    try:
        lines = [line.split() for line in read_text(file).splitlines()]
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise StateError(
            f"the list of drained engines {file} cannot be read: {why}",
            hint=f"rm -r {shlex.quote(str(file))}, then deploy drain ENGINE for each that is to be "
            "drained",
        ) from exc
    found = {words[0]: BY_PERSON for words in lines if len(words) == 1}
    owned = {words[0]: words[1] for words in lines if len(words) == 2}
    if owned and _is_owned(file):
        for engine, owner in owned.items():
            found.setdefault(engine, f"a restart or swap (pid {owner.removeprefix(_BY_COMMAND)})")
    return found


def write_drained(file: Path, engine: str, *, drained: bool) -> None:
    """Drain an engine, or use it again, until the next command says otherwise."""
    engines = _by_person(file) - {engine} | ({engine} if drained else set())
    _write(file, sorted(engines))


@contextmanager
def drained_by_command(file: Path, engines: Iterable[str]) -> Iterator[None]:
    """Drain engines for the length of a block; at most as long as this process lives."""
    from deploy.runtime.lock import held  # `deploy status` does not need it

    lock = _lock_file(file)
    refusal = StateError(f"{lock} is locked by another process", hint="deploy restart router")
    # The router, which may be another user, reads it for a moment; longer is an error.
    with held(lock, refusal, within_s=_LOCK_S, mode=0o644):
        before = sorted(_by_person(file))
        _write(file, [*before, *(f"{engine} {_BY_COMMAND}{os.getpid()}" for engine in engines)])
        try:
            yield
        finally:
            _write(file, before)


def _by_person(file: Path) -> set[str]:
    return {engine for engine, who in drained_engines(file).items() if who == BY_PERSON}


def _is_owned(file: Path) -> bool:
    """Tell whether a command holds the lock."""
    try:
        with opened_file(_lock_file(file)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it does not exist, or something else has its name
        pass
    return False


def _lock_file(file: Path) -> Path:
    return file.with_suffix(".lock")


def _write(file: Path, lines: list[str]) -> None:
    """Replace the file in one step.

    All users may read the file, since a router's container has another user; the stack's folder
    is closed to them.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_suffix(".tmp")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.chmod(0o644)
    new.replace(file)
