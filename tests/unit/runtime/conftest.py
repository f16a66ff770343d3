"""Real small processes, none of which outlives its test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.runtime import home
from deploy.runtime.process import sessions

# The interpreter without its site packages starts in a hundredth of a second.
PYTHON = (sys.executable, "-S", "-c")

Spawn = Callable[..., subprocess.Popen[bytes]]


def program(text: str) -> tuple[str, ...]:
    """Return the argv that runs a Python program."""
    return (*PYTHON, textwrap.dedent(text))


def kill_session(session: int) -> None:
    """End all of a session, by other means than those under test."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == session:
                process.kill()


def wait_until_executed(pid: int) -> None:
    """Wait until a new process shows its environment; for a moment it runs and shows none."""
    deadline = time.monotonic() + 5
    with contextlib.suppress(psutil.Error):
        while not psutil.Process(pid).environ() and time.monotonic() < deadline:
            time.sleep(0.005)


@pytest.fixture(autouse=True)
def _temporary_folders_of_stacks(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "_TEMP", tmp_path_factory.mktemp("tmp"))


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Start a Python program in a session of its own, logging to tmp_path/log."""
    started: list[subprocess.Popen[bytes]] = []

    def run(text: str, **environ: str) -> subprocess.Popen[bytes]:
        process = sessions.spawn(
            program(text), {**os.environ, **environ}, log=tmp_path / "log", cwd=tmp_path
        )
        started.append(process)
        wait_until_executed(process.pid)
        return process

    yield run
    for process in started:
        kill_session(process.pid)
        process.wait()
