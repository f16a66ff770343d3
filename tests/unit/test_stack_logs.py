"""A failed end-to-end test shows the last lines of its stack; one that passes shows nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.runtime.secrets import ensure_secrets
from deploy.workflows.down import stop_stack
from tests.e2e import conftest as e2e
from tests.e2e import stack_logs
from tests.e2e.stack_logs import Stacks, _logs_of, redacted
from tests.unit.workflows.conftest import opened

SECRET = "api-key-of-a-client"
# A stack whose engine has ended, as a test of a folder "home0" leaves it behind.
TESTS = """
import os, shutil
import pytest
from tests.e2e.stack_logs import before_command, Stacks

SECRET = "api-key-of-a-client"

def ended_stack(folder, name, lines=50, old=False):
    stack = folder / "stacks" / name
    (stack / "logs").mkdir(parents=True)
    (stack / "secrets").mkdir()
    (stack / "secrets" / "api_key").write_text(SECRET)
    log = stack / "logs" / "producer-0.log"
    said = "".join(f"{name} said {n} {SECRET}\\n" for n in range(lines))
    log.write_text("ValueError: no room\\n" + said)
    if old:
        os.utime(log, (1, 1))
    return stack

def test_fails(tmp_path):
    ended_stack(tmp_path, "dead")
    ended_stack(tmp_path, "long-ago", old=True)
    assert SECRET == "another"

@pytest.fixture
def taken_down(tmp_path):
    stack = ended_stack(tmp_path, "down")
    try:
        pytest.fail("up failed", pytrace=False)
    finally:
        before_command(("down",))
        shutil.rmtree(stack)

def test_set_up(taken_down):
    pass

@pytest.fixture
def fails_at_its_end(tmp_path):
    yield
    ended_stack(tmp_path, "late")
    raise RuntimeError("in the end")

def test_tear_down(fails_at_its_end):
    pass

def test_passes(tmp_path):
    stack = ended_stack(tmp_path, "fine")
    before_command(("down",))
    assert Stacks.kept == ()
"""
CONFTEST = """
from pathlib import Path
from tests.e2e import stack_logs
from tests.e2e.stack_logs import homes, pytest_runtest_logstart, pytest_runtest_makereport
stack_logs.LOGS = Path("logs").resolve()
"""


@dataclass(frozen=True)
class Shown:
    """What a run of pytest showed and kept."""

    code: int
    terminal: str
    junit: str
    logs: dict[str, str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Shown:
    folder = tmp_path_factory.mktemp("run")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "--junitxml=junit.xml", "--basetemp=temp"),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = folder / "logs"
    kept = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    return Shown(done.returncode, done.stdout, (folder / "junit.xml").read_text(), kept)


@pytest.mark.parametrize("stack", ["dead", "down", "late"])
def test_the_last_lines_of_a_failed_stack_are_shown(shown: Shown, stack: str) -> None:
    """Wherever the test failed, and after `down` has removed the log."""
    assert shown.code == 1
    for text in (shown.terminal, shown.junit):
        assert f"producer-0 of the stack {stack} (ended)" in text
        assert "first error: ValueError: no room" in text
        assert f"{stack} said 49 ***" in text and f"{stack} said 10 ***" in text
        assert f"{stack} said 9 " not in text


def test_reports_contain_no_secret(shown: Shown) -> None:
    assert SECRET not in shown.terminal.replace(f'SECRET = "{SECRET}"', "")
    assert SECRET not in shown.junit
    assert "'***' == 'another'" in shown.junit


def test_whole_logs_of_failed_stacks_are_kept(shown: Shown) -> None:
    assert sorted(shown.logs) == [
        "test_it.py-test_fails/dead-producer-0.log",
        "test_it.py-test_set_up/down-producer-0.log",
        "test_it.py-test_tear_down/late-producer-0.log",
    ]
    for log in shown.logs.values():
        assert len(log.splitlines()) == 51 and SECRET not in log


def test_other_stacks_are_left_out(shown: Shown) -> None:
    for stack in ("long-ago", "fine"):
        assert f"{stack} said" not in shown.terminal + shown.junit


def test_the_condition_of_each_service_is_shown(tmp_path: Path) -> None:
    """The condition of each service is asked for; one that was killed has exited."""
    with opened(tmp_path) as lab:
        state = lab.up(lab.spec()).running.state
        engine = psutil.Process(state.services["producer-0"].pid)
        engine.kill()
        engine.wait(timeout=60)
        found = {log.service: log for log in _logs_of(lab.home, "pdkit")}
        stop_stack(lab.home, "pdkit", lab.lines.append)
        assert found["producer-0"].condition == "exited"
        assert found["consumer-0"].condition == found["redis"].condition == "ready"
        assert any("ready to accept connections" in line.lower() for line in found["redis"].lines)
        assert list(_logs_of(lab.home, "pdkit")) == []


def test_end_to_end_tests_use_every_hook() -> None:
    names = {name for name in vars(stack_logs) if name.startswith("pytest_")} | {"homes"}
    assert len(names) == 3
    assert {name: getattr(e2e, name, None) for name in names} == {
        name: getattr(stack_logs, name) for name in names
    }


@pytest.mark.parametrize("failing", [True, False])
def test_logs_are_kept_before_a_failed_start_is_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    monkeypatch.setattr(Stacks, "folder", tmp_path)
    monkeypatch.setattr(Stacks, "kept", ())
    log = tmp_path / "home0" / "stacks" / "one" / "logs" / "producer-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("the end\n")
    kit = e2e.Deploy(tmp_path / "home0", command=("true",))
    with contextlib.suppress(AssertionError):
        try:
            assert not failing
        finally:
            assert kit.run("down").code == 0
    assert [kept.lines for kept in Stacks.kept] == [("the end",)] * failing


def test_logs_are_shown_with_a_broken_state_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stacks, "began", 0.0)
    with opened(tmp_path) as lab:
        lab.up(lab.spec())
        lab.home.stack("pdkit").state_file.write_text("{")
        assert "producer-0" in {log.service for log in _logs_of(lab.home, "pdkit")}


def test_a_long_log_keeps_its_last_lines() -> None:
    said = "a line that is nothing special\n" * 5000
    text = f"{said}redis://me:pass-word@host\nwhy it died\n"
    assert redacted(text) == f"{said}redis://***@host\nwhy it died\n"


def test_generated_secrets_are_recognized_by_their_form(tmp_path: Path) -> None:
    made = ensure_secrets(tmp_path, ("a", "b"))
    for secret in (made["a"].reveal(), made["b"].reveal()):
        for text in (f"requirepass {secret}", repr(f"\n{secret}\n"), f"'{secret}'"):
            assert secret not in redacted(text)


@pytest.mark.parametrize(
    "text", ["0f" * 32, "test_" * 12, "a/LongPath/" * 9, "pdkit_connector.errors.StoreGone: x"]
)
def test_other_text_is_not_changed(text: str) -> None:
    assert redacted(text) == text
