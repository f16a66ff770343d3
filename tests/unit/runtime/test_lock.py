"""One lock a stack, tried with real second processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import filelock
import pytest

from deploy.errors import StackLocked
from deploy.runtime import lock
from deploy.runtime.lock import bench_lock, planning_lock, stack_lock
from tests.conftest import plain_environ

HOLDER = """
import sys
from pathlib import Path
from deploy.runtime.lock import bench_lock, stack_lock
with stack_lock(Path(sys.argv[1]), "demo"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock; it gives it back at the end."""
    with subprocess.Popen(
        (sys.executable, "-c", HOLDER, str(path)),
        env=plain_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks" / "demo.lock"


def test_a_second_holder_is_refused(path: Path) -> None:
    with held_elsewhere(path):
        with pytest.raises(StackLocked, match="'demo'") as caught, stack_lock(path, "demo"):
            pytest.fail("both hold the lock")
        assert caught.value.exit_code == 3
        assert "deploy status --name demo" in caught.value.hint
        with stack_lock(path.with_name("other.lock"), "other"):
            pass  # another stack is not in the way
    with stack_lock(path, "demo"):
        pass
    assert not path.exists()


def test_a_lock_held_for_a_moment_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `doctor` and another stack's `up` do, when they ask whether it is held."""
    monkeypatch.setattr(lock, "_MOMENT_S", 5.0)  # a busy machine may wake the timer late
    path.parent.mkdir()
    momentary = filelock.FileLock(path, thread_local=False)
    momentary.acquire()
    threading.Timer(0.1, momentary.release).start()
    with stack_lock(path, "demo"):
        assert not momentary.is_locked


def test_being_refused_leaves_the_lock_to_its_holder(path: Path) -> None:
    with held_elsewhere(path):
        for _ in range(2):
            with pytest.raises(StackLocked), stack_lock(path, "demo"):
                pytest.fail("both hold the lock")
        assert path.exists()


def test_the_file_is_gone_afterwards(path: Path) -> None:
    with stack_lock(path, "demo"):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_file_is_gone_after_an_exception(path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), stack_lock(path, "demo"):
        raise error
    assert not path.exists()
    with stack_lock(path, "demo"):
        pass


def test_a_killed_holder_leaves_no_lock(path: Path) -> None:
    with held_elsewhere(path) as holder:
        holder.kill()
        holder.wait()
        assert path.exists(), "it could not clear up"
        with stack_lock(path, "demo"):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("hold", "refusal"),
    [
        (bench_lock, "another deploy bench is running"),
        (planning_lock, "lock for GPUs and ports for a minute"),
    ],
)
def test_a_benchmark_and_planning_are_for_one_command_at_a_time(
    hold: Callable[[Path], AbstractContextManager[None]],
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "_PLANNING_S", 0.0)
    path = tmp_path / "shared.lock"
    with held_elsewhere(path):
        busy = pytest.raises(StackLocked, match=refusal)
        with busy, hold(path):
            pass
    with hold(path):
        assert path.exists()
    assert not path.exists()
