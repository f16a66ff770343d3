"""What all tests share. Imports nothing but pytest, since some tests run beside other packages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import unused_port

REPO = Path(__file__).resolve().parents[1]
SETTLED = {"PDKIT_VENDOR": "cpu", "PDKIT_RUNTIME": "process"}
NO_HOME = "/nonexistent/home"
NO_DOCKER = "unix:///nonexistent/docker.sock"


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return REPO


@pytest.fixture(scope="session")
def deploy() -> Callable[..., Ended]:
    """Run `python -m deploy …` as a user would: a process of its own, in a given folder."""

    def run(*arguments: str, cwd: Path, home: Path, settled: bool = True, **environ: str) -> Ended:
        env = plain_environ(settled=settled, PDKIT_HOME=str(home), **environ)
        return run_python("-m", "deploy", *arguments, cwd=cwd, env=env)

    return run


def run_python(*arguments: str, cwd: Path, env: dict[str, str]) -> Ended:
    """Run this interpreter until it ends."""
    done = subprocess.run(
        (sys.executable, *arguments),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def plain_environ(*, settled: bool = True, **more: str) -> dict[str, str]:
    """Return an environment that holds nothing of this machine but PATH, and no Docker engine.

    HOME is given, as the user may have no entry in /etc/passwd; nothing may be put there.
    `settled` names vendor and runtime, so that what this machine has does not decide. `PYTHONPATH`
    in `more` is put behind the checkout's.
    """
    path = os.pathsep.join(filter(None, (str(REPO), more.pop("PYTHONPATH", ""))))
    plain = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "COLUMNS": "80", "TERM": "dumb"}
    plain |= {"HOME": NO_HOME, "DOCKER_HOST": NO_DOCKER}
    return {**plain, **(SETTLED if settled else {}), "PYTHONPATH": path, **more}


@pytest.fixture
def free_port() -> int:
    return unused_port()


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds; the limit only ends what hangs."""

    def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def golden(repo: Path) -> Callable[[str, str], None]:
    """Compare a text with a file in tests/golden; `UPDATE_GOLDENS=1` writes it instead."""

    def compare(name: str, text: str) -> None:
        file = repo / "tests" / "golden" / name
        if os.environ.get("UPDATE_GOLDENS"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{file} is missing; UPDATE_GOLDENS=1 writes it"
        assert text == file.read_text(encoding="utf-8"), "if this is meant: UPDATE_GOLDENS=1"

    return compare


def build_wheel(folder: Path, target: Path) -> Path:
    """Build the wheel of a folder with a pyproject.toml."""
    done = subprocess.run(
        (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(repo, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
