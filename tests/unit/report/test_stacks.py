"""A failed test shows what its stack said last, alone and under xdist; one that passes, nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.workflows.down import stop_stack
from tests.e2e import conftest as e2e
from tests.report import stacks
from tests.report.stacks import Stacks, _logs_of
from tests.report.watch import Watch
from tests.unit.workflows.conftest import opened

SECRET = "api-key-of-a-client"
# A stack whose engine has ended, as a test of a folder "home0" leaves it behind.
TESTS = """
import os, shutil
import pytest
from tests.report.stacks import before_command, Stacks

SECRET = "api-key-of-a-client"

def ended_stack(folder, name, lines=50, old=False):
    stack = folder / "stacks" / name
    (stack / "logs").mkdir(parents=True)
    (stack / "secrets").mkdir()
    (stack / "secrets" / "api_key").write_text(SECRET)
    log = stack / "logs" / "producer-0.log"
    said = "".join(f"{name} said {n} {SECRET}\\n" for n in range(lines))
    log.write_text("ValueError: no room\\n" + said)
    Stacks.watch.look()
    if old:
        os.utime(log, (1, 1))
    shutil.rmtree(stack / "secrets")
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
from tests.report.stacks import (
    pytest_runtest_logstart, pytest_runtest_makereport, pytest_sessionfinish,
    pytest_terminal_summary, pytest_testnodedown, watched_stacks,
)
"""


@dataclass(frozen=True)
class Told:
    """What a run of pytest told."""

    code: int
    terminal: str
    junit: str
    logs: dict[str, str]


def run(folder: Path, repo: Path, *options: str) -> Told:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    results = folder / "results"
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "--junitxml=junit.xml", "--basetemp=temp", *options),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repo), "PDKIT_TEST_RESULTS": str(results)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = {str(p.relative_to(results / "logs")): p.read_text() for p in results.rglob("*.log")}
    return Told(done.returncode, done.stdout, (folder / "junit.xml").read_text(), logs)


@pytest.fixture(scope="module", params=["-n0", "-n2"])
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, repo: Path
) -> Told:
    return run(tmp_path_factory.mktemp("run"), repo, request.param)


@pytest.mark.parametrize("stack", ["dead", "down", "late"])
def test_the_last_lines_of_a_failed_stack_are_shown(told: Told, stack: str) -> None:
    """They are told wherever the test failed, and after `down` has removed the log."""
    assert told.code == 1
    for text in (told.terminal, told.junit):
        assert f"producer-0 of the stack {stack} (ended)" in text
        assert "first error: ValueError: no room" in text
        assert f"{stack} said 49 ***" in text and f"{stack} said 10 ***" in text
        assert f"{stack} said 9 " not in text


def test_reports_contain_no_secret(told: Told) -> None:
    assert SECRET not in told.terminal.replace(f'SECRET = "{SECRET}"', "")
    assert SECRET not in told.junit
    assert "'***' == 'another'" in told.junit


def test_whole_logs_of_failed_stacks_are_kept(told: Told) -> None:
    assert sorted(told.logs) == [
        "test_it.py-test_fails/dead-producer-0.log",
        "test_it.py-test_set_up/down-producer-0.log",
        "test_it.py-test_tear_down/late-producer-0.log",
    ]
    for log in told.logs.values():
        assert len(log.splitlines()) == 51 and SECRET not in log


def test_other_stacks_are_left_out(told: Told) -> None:
    for stack in ("long-ago", "fine"):
        assert f"{stack} said" not in told.terminal + told.junit


def test_a_passed_test_has_no_log_section(tmp_path: Path, repo: Path) -> None:
    told = run(tmp_path, repo, "-k", "passes")
    assert told.code == 0
    assert told.logs == {} and "its last lines" not in told.terminal + told.junit
    assert "0 engine starts in 0 stacks" in told.terminal


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
    names = {name for name in vars(stacks) if name.startswith("pytest_")} | {"watched_stacks"}
    assert len(names) == 6
    assert {name: getattr(e2e, name, None) for name in names} == {
        name: getattr(stacks, name) for name in names
    }


@pytest.mark.parametrize("failing", [True, False])
def test_logs_are_kept_before_a_failed_start_is_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    monkeypatch.setattr(Stacks, "watch", Watch(tmp_path))
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
