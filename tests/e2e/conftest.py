"""End-to-end tests use the installed `deploy` command, real engines and a real Redis.

Every test has a home folder of its own or shares its module's; no test leaves a process behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from deploy.runtime.home import Home
from deploy.runtime.process.launcher import MARKER
from deploy.runtime.secrets import Secret, read_secrets
from deploy.stack.layout import ENGINE_KEY
from tests.contract import validated
from tests.e2e.stack_logs import (  # noqa: F401 - hooks, and a fixture for every test
    before_command,
    homes,
    pytest_runtest_logstart,
    pytest_runtest_makereport,
)

COMMAND = str(Path(sys.executable).parent / "deploy")
# Kept once for all homes of a run: that the fixes take, and what engines in containers look up.
# scripts/test makes one folder for all parts of its run.
if "PDKIT_TEST_KEPT" not in os.environ:
    _made = tempfile.TemporaryDirectory(prefix="pdkit-kept-")
    os.environ["PDKIT_TEST_KEPT"] = _made.name
KEPT = Path(os.environ["PDKIT_TEST_KEPT"])
UP_TIMEOUT_S = 600


@dataclass(frozen=True)
class Ran:
    """A command that ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def envelope(self) -> dict[str, Any]:
        return validated(json.loads(self.stdout))

    @property
    def data(self) -> Any:
        return self.envelope["data"]

    def __str__(self) -> str:
        return f"exit {self.code} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


@dataclass(frozen=True)
class Deploy:
    """The `deploy` command with a home folder, and what a test wants to know of that home."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = (COMMAND,)

    def __post_init__(self) -> None:
        for name in ("fixes", "engines"):
            kept, link = KEPT / name, self.home / "cache" / name
            kept.mkdir(exist_ok=True)
            if not os.path.lexists(link):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(kept)

    def environ(self) -> dict[str, str]:
        """Return the environment of the command; processes unless a test says otherwise."""
        defaults = {
            "PDKIT_RUNTIME": "process",
            "PDKIT_VENDOR": "cpu",
            "PDKIT_SUPERVISE": "false",  # most tests look at what died
        }
        return {**os.environ, "PDKIT_HOME": str(self.home), **defaults, **self.env}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        before_command(arguments)
        return subprocess.Popen(
            (*self.command, *arguments),
            env=self.environ(),
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout_s: float = UP_TIMEOUT_S) -> Ran:
        return self.ended(self.start(*arguments), timeout_s=timeout_s)

    def ended(self, process: subprocess.Popen[str], timeout_s: float = UP_TIMEOUT_S) -> Ran:
        """Wait for a command that was started."""
        began = time.monotonic()
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
            pytest.fail(f"{process.args} did not end within {timeout_s} s\n{stdout}\n{stderr}")
        return Ran(process.returncode, stdout, stderr, time.monotonic() - began)

    def engine_key(self, name: str) -> Secret:
        """Return the key that the engines of a stack ask for."""
        folder = Home(self.home, self.home).stack(name).secrets_dir
        return read_secrets(folder, (ENGINE_KEY,))[ENGINE_KEY]

    def ok(self, *arguments: str) -> Any:
        """Run with --json, expect exit 0, and return the data."""
        ran = self.run(*arguments, "--json")
        assert ran.code == 0, ran
        return ran.data

    def state(self, name: str) -> dict[str, Any]:
        return json.loads(Home(self.home, self.home).stack(name).state_file.read_text())

    def pid(self, name: str, service: str) -> int:
        return int(self.state(name)["services"][service]["pid"])

    def password(self, name: str) -> str:
        return (
            (Home(self.home, self.home).stack(name).secrets_dir / "redis_password")
            .read_text()
            .strip()
        )

    def log(self, name: str, service: str) -> str:
        return (Home(self.home, self.home).stack(name).logs_dir / f"{service}.log").read_text()

    def redis(self, name: str) -> redis.Redis:
        socket = Home(self.home, self.home).stack(name).temp_dir / "redis.sock"
        return redis.Redis(unix_socket_path=str(socket), password=self.password(name))

    def processes(self, name: str) -> list[psutil.Process]:
        """Return every living process of a stack, found by its mark, not by the state file."""
        mark = str(Home(self.home, self.home).stack(name).root)
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == mark and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def guards(self) -> int:
        """Return how many processes remove the keys of a check of this home, or wait to."""
        found = 0
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            found += "workflows.key_cleanup" in line and str(self.home) in line
        return found

    def assert_nothing_left(self, name: str, port: int) -> None:
        """Check that no process, port, lock, socket or state of the stack is left."""
        assert self.processes(name) == []
        for offset in (0, 1, 2, 10, 11, 12, 13):
            assert is_free(port + offset), f"port {port + offset} is still taken"
        files = Home(self.home, self.home).stack(name)
        assert not files.state_file.exists()
        assert not files.secrets_dir.exists()
        assert not files.temp_dir.exists()
        assert not list(Home(self.home, self.home).lock_file(name).parent.glob("*"))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def running_stack(deploy: Deploy, name: str, port: int, *options: str) -> Iterator[Any]:
    """Bring a stack up and, whatever happens, down again; yields the data of `up --json`."""
    try:
        yield deploy.ok("up", "--name", name, "--port", str(port), *options)
    finally:
        ran = deploy.run("down", "--name", name)
        assert ran.code == 0, ran
        deploy.assert_nothing_left(name, port)


def eventually(
    condition: Callable[[], object], *, within_s: float = 300, every_s: float = 0.1
) -> bool:
    """Tell whether a condition comes true; the limit only ends what hangs."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
    return bool(condition())


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    """Return the command with a fresh home."""
    return Deploy(tmp_path)
