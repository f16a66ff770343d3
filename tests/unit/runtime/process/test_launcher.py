"""The process runtime, with real small processes in place of engines."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import MachineError, MissingTool, StackUnhealthy
from deploy.runtime import home as home_module
from deploy.runtime import readiness
from deploy.runtime.home import StackHome
from deploy.runtime.launcher import LOG_TAIL
from deploy.runtime.process import launcher as launcher_module
from deploy.runtime.process import sessions
from deploy.runtime.process.launcher import (
    MARKER,
    Launched,
    ProcessLauncher,
    describe_exit,
    make_private,
)
from deploy.runtime.readiness import wait_ready
from deploy.runtime.secrets import Secret, ensure_secrets
from deploy.runtime.state import write_state_file
from deploy.stack.service import ConfigFile, HealthCheck, Service
from tests.unit.runtime.conftest import kill_session, program, wait_until_executed

SLEEPER = "import time; time.sleep(60)"

Start = Callable[..., tuple[Service, Launched]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackHome:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "sockets"))
    (tmp_path / "sockets").mkdir()
    return StackHome(tmp_path / "demo")


@pytest.fixture
def launcher(home: StackHome) -> ProcessLauncher:
    return ProcessLauncher(home)


@pytest.fixture
def start(launcher: ProcessLauncher) -> Iterator[Start]:
    """Start a Python program as a service."""
    pids: list[int] = []

    def run(
        text: str, *, name: str = "engine", starts: int = 1, ready_s: float = 30.0, **fields: Any
    ) -> tuple[Service, Launched]:
        health = HealthCheck("http", "/health")
        service = Service(
            name, "producer", program(text), "127.0.0.1", 1, health, ready_s, **fields
        )
        launched = launcher.start(service, {"word": Secret("hunter2")}, starts=starts)
        pids.append(launched.record.pid)
        wait_until_executed(launched.record.pid)
        return service, launched

    yield run
    for pid in pids:
        kill_session(pid)


class TestStart:
    def test_a_record_has_pid_and_start_time(self, start: Start, launcher: ProcessLauncher) -> None:
        _, launched = start(SLEEPER)
        record = launched.record
        assert record.pid == launched.process.pid
        assert record.start_time == sessions.start_time(record.pid) > 0
        assert record.starts == 1
        assert Path(record.log) == launcher.log_path("engine")
        assert launcher.state(record) == "running"
        assert launched.ended is None

    def test_files_hold_the_secret_and_only_the_owner_reads_them(
        self, start: Start, home: StackHome
    ) -> None:
        path = home.run_dir / "engine" / "a.conf"
        start(SLEEPER, files=(ConfigFile(str(path), "password @{word}\n"),))
        assert path.read_text() == "password hunter2\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def test_a_service_gets_its_environment_and_the_mark(
        self, start: Start, home: StackHome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("INHERITED", "yes")
        monkeypatch.setenv("REPLACED", "theirs")
        _, launched = start(
            f"import os; print([os.environ[n] for n in ('INHERITED', 'REPLACED', {MARKER!r})])",
            env={"REPLACED": "ours"},
        )
        assert launched.process.wait() == 0
        assert Path(launched.record.log).read_text() == f"{['yes', 'ours', str(home.root)]}\n"

    @pytest.mark.parametrize(
        ("inherited", "expected"), [("/theirs", "/ours:/theirs"), (None, "/ours")]
    )
    def test_python_path_comes_first(
        self,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        inherited: str | None,
        expected: str,
    ) -> None:
        if inherited:
            monkeypatch.setenv("PYTHONPATH", inherited)
        else:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        _, launched = start(
            "import os; print(os.environ['PYTHONPATH'])", env={"PYTHONPATH": "/ours"}
        )
        launched.process.wait()
        assert Path(launched.record.log).read_text() == f"{expected}\n"

    @pytest.mark.parametrize(
        "name",
        ["LMCACHE_CHUNK_SIZE", "VLLM_API_KEY", "VLLM_KV_CACHE_LAYOUT", "PROMETHEUS_MULTIPROC_DIR"],
    )
    def test_settings_of_the_users_shell_do_not_reach_the_engines(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """LMCache and vLLM let their variables overrule what the plan says."""
        monkeypatch.setenv(name, "16")
        _, launched = start(f"import os; print(os.environ.get('{name}'))")
        launched.process.wait()
        assert Path(launched.record.log).read_text() == "None\n"
        _, launched = start(f"import os; print(os.environ.get('{name}'))", env={name: "ours"})
        launched.process.wait()
        assert "ours" in Path(launched.record.log).read_text()

    def test_a_first_start_begins_a_new_log_and_a_repair_continues_it(
        self, start: Start, launcher: ProcessLauncher
    ) -> None:
        for starts, text in ((1, "old"), (1, "first"), (2, "second")):
            start(f"print({text!r})", starts=starts)[1].process.wait()
        assert launcher.log_path("engine").read_text() == "first\nsecond\n"

    def test_a_program_that_is_missing(self, launcher: ProcessLauncher) -> None:
        service = Service(
            "redis", "redis", ("/no/such/program",), "127.0.0.1", 1, HealthCheck("redis"), 1.0
        )
        with pytest.raises(MissingTool, match="redis: /no/such/program") as caught:
            launcher.start(service, {})
        assert caught.value.exit_code == 3


class TestAfterwards:
    def test_states_of_a_process_are_read(self, start: Start, launcher: ProcessLauncher) -> None:
        assert launcher.state(None) == "not started"
        _, launched = start("pass")
        launched.process.wait()
        assert launcher.state(launched.record) == "exited"

    def test_the_environment_it_really_runs_with(
        self, start: Start, launcher: ProcessLauncher
    ) -> None:
        _, launched = start(SLEEPER, env={"PYTHONHASHSEED": "0"})
        assert launcher.environment(launched.record)["PYTHONHASHSEED"] == "0"
        launcher.stop({"engine": launched.record}, grace_s=5)
        assert launcher.environment(launched.record) == {}

    def test_resident_memory_is_read(
        self, start: Start, launcher: ProcessLauncher, eventually: Callable[..., None]
    ) -> None:
        _, launched = start(SLEEPER)
        eventually(lambda: 1 <= launcher.resident_mib(launched.record) < 500)

    def test_stop_ends_those_it_is_given(self, start: Start, launcher: ProcessLauncher) -> None:
        _, one = start(SLEEPER, name="one")
        _, two = start(SLEEPER, name="two")
        launcher.stop({"one": one.record}, grace_s=5)
        assert launcher.state(one.record) == "exited"
        assert launcher.state(two.record) == "running"

    def test_stop_marked_needs_no_record(self, start: Start, launcher: ProcessLauncher) -> None:
        for name in ("one", "two"):
            start(SLEEPER, name=name)
        assert launcher.stop_marked(grace_s=5) == 2
        assert launcher.stop_marked(grace_s=5) == 0

    def test_stop_marked_leaves_other_stacks(
        self, start: Start, launcher: ProcessLauncher, tmp_path: Path
    ) -> None:
        _, launched = start(SLEEPER)
        assert ProcessLauncher(StackHome(tmp_path / "other")).stop_marked(grace_s=5) == 0
        assert launcher.state(launched.record) == "running"

    @pytest.mark.parametrize("keep_logs", [True, False])
    def test_clear_removes_files_and_keeps_logs_if_asked(
        self, start: Start, launcher: ProcessLauncher, home: StackHome, keep_logs: bool
    ) -> None:
        ensure_secrets(home.secrets_dir, ("word",))
        write_state_file(home.state_file, {})
        start("pass")[1].process.wait()
        assert home.temp_dir.is_dir()
        launcher.clear(keep_logs=keep_logs)
        left = [path.name for path in home.root.rglob("*")] if home.root.exists() else []
        assert sorted(left) == (["engine.log", "logs"] if keep_logs else [])
        assert not home.temp_dir.exists()
        launcher.clear(keep_logs=keep_logs)  # again is fine

    def test_clear_does_not_end_at_a_name_that_another_user_took(
        self,
        launcher: ProcessLauncher,
        home: StackHome,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(launcher_module, "_SHARED_MEMORY", tmp_path)
        (tmp_path / f"{home.temp_dir.name}-x").mkdir()  # which cannot be unlinked either
        ensure_secrets(home.secrets_dir, ("word",))
        launcher.clear(keep_logs=False)
        assert not home.secrets_dir.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-15, "killed by signal 15"),
        (-9, "killed by signal 9; the kernel does that when memory runs out"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


class TestWaiting:
    """Readiness is a file that the service's program writes."""

    @pytest.fixture
    def wait(self, launcher: ProcessLauncher, tmp_path: Path) -> Callable[..., dict[str, float]]:
        def run(
            *services: tuple[Service, Launched],
            only: set[str] | None = None,
            report: Callable[[str], None] = lambda _line: None,
        ) -> dict[str, float]:
            launched = {service.name: (service, process) for service, process in services}
            return wait_ready(
                launched,
                lambda service: (tmp_path / f"{service.name} is ready").exists(),
                report,
                launcher,
                only=set(launched) if only is None else only,
            )

        return run

    def ready(self, path: Path, name: str, *, then: str = "time.sleep(60)") -> str:
        """Return a program that becomes ready after a moment."""
        flag = str(path / f"{name} is ready")
        return f"import time; time.sleep(0.1); open({flag!r}, 'w').close(); {then}"

    def test_ready_services_and_how_long_each_took(
        self, start: Start, wait: Callable[..., dict[str, float]], tmp_path: Path
    ) -> None:
        lines: list[str] = []
        took = wait(
            start(self.ready(tmp_path, "one"), name="one"),
            start(self.ready(tmp_path, "two"), name="two"),
            report=lines.append,
        )
        assert set(took) == {"one", "two"}
        assert all(0.1 <= seconds < 30 for seconds in took.values())
        assert sorted(line.split(" after")[0] for line in lines) == ["one is ready", "two is ready"]

    def test_only_the_wanted_services_are_waited_for(
        self, start: Start, wait: Callable[..., dict[str, float]], tmp_path: Path
    ) -> None:
        never, one = start(SLEEPER, name="never"), start(self.ready(tmp_path, "one"), name="one")
        assert set(wait(never, one, only={"one"})) == {"one"}

    def test_a_crash_is_reported_at_once_with_the_last_lines(
        self, start: Start, wait: Callable[..., dict[str, float]]
    ) -> None:
        crashing = """
            import sys, time
            for number in range(40):
                print("line", number)
            print("\\x1b[31mRuntimeError: weights are corrupt\\x1b[0m", flush=True)
            time.sleep(0.2)
            sys.exit(3)
        """
        began = time.monotonic()
        with pytest.raises(StackUnhealthy) as caught:
            wait(start(SLEEPER, name="slow"), start(crashing, name="crashing"))
        assert time.monotonic() - began < 15, "of the 30 that it may take to be ready"
        error = caught.value
        assert error.exit_code == 4
        assert "crashing died while starting (exit code 3)" in error.message
        assert "/demo/logs/crashing.log" in error.message
        assert len(error.details) == LOG_TAIL
        assert error.details[-1] == "RuntimeError: weights are corrupt"
        assert error.details[0] == f"line {40 - LOG_TAIL + 1}"

    def test_the_log_of_an_earlier_start_is_not_the_cause(
        self, start: Start, wait: Callable[..., dict[str, float]]
    ) -> None:
        start("print('OSError: of the first')")[1].process.wait(10)
        second = start("raise SystemExit('ValueError: of the second')", starts=2)
        with pytest.raises(StackUnhealthy, match=r"code 1\), ValueError: of the second") as caught:
            wait(second)
        assert caught.value.details == ("ValueError: of the second",)

    def test_a_service_that_dies_after_it_served_is_named(
        self, start: Start, wait: Callable[..., dict[str, float]], tmp_path: Path
    ) -> None:
        dying = self.ready(tmp_path, "dying", then="time.sleep(0.4); raise SystemExit(5)")
        with pytest.raises(StackUnhealthy, match=r"dying died.*exit code 5"):
            wait(start(dying, name="dying"), start(SLEEPER, name="slow"))

    def test_any_service_that_dies_is_named(
        self, start: Start, wait: Callable[..., dict[str, float]]
    ) -> None:
        with pytest.raises(StackUnhealthy, match="redis died"):
            wait(start("pass", name="redis"), start(SLEEPER, name="slow"), only={"slow"})

    def test_a_death_by_signal(self, start: Start, wait: Callable[..., dict[str, float]]) -> None:
        killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        with pytest.raises(StackUnhealthy, match=r"killed by signal 9; .*memory"):
            wait(start(killed))

    def test_a_slow_one_is_not_called_dead(
        self, start: Start, wait: Callable[..., dict[str, float]]
    ) -> None:
        slow = "import time; print('loading', flush=True); time.sleep(60)"
        began = time.monotonic()
        with pytest.raises(StackUnhealthy) as caught:
            wait(start(slow, ready_s=2))  # in which a busy machine starts Python
        assert 2 <= time.monotonic() - began < 60
        assert "runs but was not ready within" in caught.value.message
        assert "timeouts.ready_s" in caught.value.hint
        assert caught.value.details == ("loading",)

    def test_the_message_names_the_deadline_as_it_is(
        self, start: Start, wait: Callable[..., dict[str, float]]
    ) -> None:
        with pytest.raises(StackUnhealthy, match=r"within 0\.3 s"):
            wait(start(SLEEPER, ready_s=0.3))

    def test_a_long_wait_shows_that_it_goes_on(
        self,
        start: Start,
        wait: Callable[..., dict[str, float]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(readiness, "_HEARTBEAT_S", 0.1)
        lines: list[str] = []
        with pytest.raises(StackUnhealthy):
            wait(start(SLEEPER, ready_s=2), report=lines.append)
        assert "still starting: engine" in lines


def test_the_interpreter_of_these_tests_is_the_one_under_test() -> None:
    assert program("pass")[0] == sys.executable


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_temporary_folder_that_others_could_write_is_not_used(
    start: Start,
    launcher: ProcessLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trap: str,
) -> None:
    monkeypatch.setattr(home_module, "_TEMP", tmp_path)
    folder = launcher._home.temp_dir
    set_trap(trap, folder)
    other = launcher._home.temp_dir
    assert other == folder.with_name(f"{folder.name}-1"), "a name that nobody has"
    start("print('started')")
    assert launcher._home.temp_dir == other
    assert home_module.is_private(other)
    with pytest.raises(MachineError, match="now belongs to another user"):
        start("print('started')", env={"TMPDIR": str(folder)})
    monkeypatch.setattr(home_module, "_TEMP_NAMES", 1)
    with pytest.raises(MachineError, match="not private folders of this user") as caught:
        make_private(launcher._home.temp_dir)
    assert "--name OTHER" in caught.value.hint


def set_trap(kind: str, folder: Path) -> None:
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        folder.symlink_to(folder.parent)
    else:
        folder.touch()
