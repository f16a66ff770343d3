"""The keys of a check: marked, so that they can be told from others' and be removed.

Prompts that a check sends to engines themselves carry a tag, which LMCache makes part of their
keys. The router drops it. What goes through the router is therefore also sent to an engine with a
tag, before: its chunks have the same hashes, so a marked key gives the name of its plain twin.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deploy.metrics.connector import ConnectorReport
from deploy.runtime.home import Home
from deploy.runtime.store import Store
from deploy.workflows.key_cleanup import DONE, mark, remove_keys
from deploy.workflows.running import RunningStack, engine_page

_PATIENCE_S = 20.0


class CheckKeys:
    """What marks the keys of one run of a check.

    If engines do not store tagged prompts under their tag, prompts have no tag, and their keys stay
    until Redis evicts them.
    """

    def __init__(self, *, tagged: bool = True) -> None:
        self.run = f"check-{secrets.token_hex(6)}"
        self.tagged = tagged
        self._names = 0

    def new_tag(self) -> str:
        """Return a new tag of this run; "" if prompts have no tags."""
        return self.new_salt() if self.tagged else ""

    def new_salt(self) -> str:
        """Return a new cache salt of this run."""
        self._names += 1
        return f"{self.run}-{self._names}-"

    def count(self, store: Store, tag: str) -> int | None:
        """Count the keys with a tag; None if unknown."""
        return store.count_marked(mark(tag)) if tag else None

    def remove(self, store: Store) -> int | None:
        """Remove the keys of this run, and their twins; return how many, or None."""
        return store.remove_marked(mark(self.run)) if self.tagged else None


def key_name(running: RunningStack, engine: str, *, timeout_s: float) -> str:
    """Return what an engine calls the model in its keys; "" if it does not say.

    Raises:
        ApiError: no answer.
    """
    report = ConnectorReport.read(engine_page(running, engine, timeout_s=timeout_s))
    return str(report.kv.get("key_name", ""))


@contextlib.contextmanager
def guarded(home: Home | None, running: RunningStack, run: str) -> Iterator[None]:
    """Have the keys of a run removed if this process does not end it, even if it is killed.

    Without a home this process removes them itself: a pod is killed with all of its processes.
    """
    if home is None:
        try:
            yield
        except BaseException:
            remove_keys(running, run)
            raise
        return
    with _cleanup(home, running.stack.name, run) as told:
        yield
        told.write(DONE)


@contextlib.contextmanager
def _cleanup(home: Home, name: str, run: str) -> Iterator[IO[bytes]]:
    """Start a process that cleans up after this one, and yield its stdin.

    It waits for DONE there. If this process is killed, stdin ends without it, and the
    keys of the run are removed.
    """
    package = Path(__file__).resolve().parents[3]
    cleanup = subprocess.Popen(
        (sys.executable, "-m", "deploy.workflows.key_cleanup", str(home.state), str(home.cache),
         name, run),
        cwd=package,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to our process group must not end it
    )  # fmt: skip
    assert cleanup.stdin is not None  # noqa: S101 - for mypy
    try:
        yield cleanup.stdin
    finally:
        with contextlib.suppress(BrokenPipeError):
            cleanup.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cleanup.wait(_PATIENCE_S)
