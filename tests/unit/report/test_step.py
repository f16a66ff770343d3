"""Failed tests are repeated once: flaky ones are told from broken ones, and fail the run, too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.report import step
from tests.report.step import Outcomes, run_step, to_repeat

TESTS = """
from pathlib import Path

def test_sound():
    pass

def test_flaky():
    ran = Path(__file__).with_name("ran")
    ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
    assert ran.read_text() == "xx"

def test_broken():
    assert False
"""


@pytest.fixture
def folder(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repo))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a third of each start
    return tmp_path


def told(results: Path) -> list[str]:
    file = results / "failed.txt"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("workers", ["0", "2"])
def test_flaky_and_broken_tests_are_told_apart(folder: Path, results: Path, workers: str) -> None:
    assert run_step("test_it.py", ["-p", "xdist", "-n", workers], began_s=time.monotonic()) == 1
    assert sorted(told(results)) == [
        "failed: test_it.py::test_broken",
        "flaky: test_it.py::test_flaky",
    ]
    assert (folder / "ran").read_text() == "xx"
    assert sorted(path.name for path in results.glob("*.xml")) == [
        "test_it-again.xml",
        "test_it.xml",
    ]


def test_a_flaky_test_alone_fails_the_step(folder: Path, results: Path) -> None:
    assert run_step("test_it.py", ["-k", "flaky"], began_s=time.monotonic()) == 1
    assert told(results) == ["flaky: test_it.py::test_flaky"]


def test_a_passed_step_reports_nothing(folder: Path, results: Path) -> None:
    assert run_step("test_it.py", ["-k", "sound"], began_s=time.monotonic()) == 0
    assert told(results) == []
    assert [path.name for path in results.glob("[!.]*")] == ["test_it.xml"]


def test_collection_errors_fail_the_step(folder: Path, results: Path) -> None:
    (folder / "test_it.py").write_text("import nothing_of_that_name\n")
    assert run_step("test_it.py", [], began_s=time.monotonic()) == pytest.ExitCode.INTERRUPTED
    assert told(results) == []


def test_nothing_is_repeated_after_the_time_limit(folder: Path, results: Path) -> None:
    assert run_step("test_it.py", [], began_s=time.monotonic() - step.DEADLINE_S) == 1
    assert (folder / "ran").read_text() == "x"
    assert [line.split(" (")[0] for line in told(results)] == [
        "failed: test_it.py::test_flaky",
        "failed: test_it.py::test_broken",
    ]
    assert all("not repeated" in line for line in told(results))


def test_many_failures_are_not_repeated(
    folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "AT_MOST", 1)
    assert run_step("test_it.py", [], began_s=time.monotonic()) == 1
    assert told(results) == [
        "flaky: test_it.py::test_flaky",
        "failed: test_it.py::test_broken (not repeated: 1 were)",
    ]


def test_tests_that_share_a_stack_are_repeated_up_to_the_failed_one() -> None:
    ran = ["a.py::one", "b.py::one", "a.py::two", "c.py::one", "b.py::two", "a.py::three"]
    first = Outcomes(["b.py::one", "a.py::two"], dict.fromkeys(ran, 1.0))
    assert to_repeat(first.failed, first, in_order=False) == ["b.py::one", "a.py::two"]
    assert to_repeat(first.failed, first, in_order=True) == ["a.py::one", "b.py::one", "a.py::two"]
