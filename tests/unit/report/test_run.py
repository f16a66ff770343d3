"""How a run of scripts/test begins and ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.__main__ import end
from tests.report.machine import machine
from tests.report.results import empty_results, results_folder

STEPS = ["install", "0", "lint", "5", "types", "7"]


def steps_of(results: Path) -> ElementTree.Element:
    return ElementTree.parse(results / "steps.xml").getroot()  # noqa: S314 - written by ourselves


def test_ends_with_times_and_machine(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.report.__main__.machine", lambda: "a machine")
    lines = end(0, STEPS, 17)
    assert [line.split() for line in lines[1:5]] == [
        ["install", "5", "s"],
        ["lint", "2", "s"],
        ["types", "10", "s"],
        ["in", "all", "17", "s"],
    ]
    assert lines[5] == "machine: a machine"
    assert lines[6:] == ["all passed"]
    suite = steps_of(results)
    assert [case.get("time") for case in suite] == ["5", "2", "10"]
    assert suite.find("testcase/failure") is None


def test_ends_with_what_failed(results: Path) -> None:
    (results_folder() / "failed.txt").write_text("flaky: a\nfailed: b\n")
    lines = end(1, STEPS, 17)
    assert lines[3].split() == ["types", "10", "s", "failed"]
    assert lines[6:] == ["flaky: a", "failed: b", f"error: types failed; results: {results}"]
    suite = steps_of(results)
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["types"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [("sse2", "no AVX2"), ("avx2", "AVX2"), ("avx2 avx512f amx_tile", "AVX2 AVX-512 AMX")],
)
def test_machine(tmp_path: Path, flags: str, named: str) -> None:
    for name, text in (
        ("proc/cpuinfo", f"processor : 0\nmodel name\t: Some EPYC\nflags\t\t: {flags}\n"),
        ("proc/loadavg", "1.50 2.00 3.00 1/2 3\n"),
        ("etc/debian_version", "12.9\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    told = machine(tmp_path)
    assert told.startswith(f"Some EPYC, {named}, ")
    assert "load 1.50 2.00 3.00, " in told and "Debian 12.9, " in told


def test_begins_with_an_empty_folder(results: Path) -> None:
    (results_folder() / "logs").mkdir()
    (results / "failed.txt").touch()
    empty_results()
    assert [path.name for path in results.iterdir()] == [".pdkit-test-results"]


def test_empties_nobody_elses_folder(results: Path) -> None:
    results.mkdir()
    (results / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="holds other files"):
        empty_results()
    assert (results / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("broken", "step"), [("ruff", "lint"), ("mypy", "types"), ("pytest", "unit")]
)
def test_the_script(tmp_path: Path, repo: Path, broken: str, step: str) -> None:
    """Its own tools are stand-ins; the first that fails ends it, and is named."""
    for name in ("scripts/install", "ruff", "mypy", "curl", "redis-server"):
        program = tmp_path / (name if "/" in name else f".venv/bin/{name}")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\nexit {int(name == broken)}\n")
        program.chmod(0o755)
    python = tmp_path / ".venv" / "bin" / "python"
    # Disguises would run the project itself; in their place one step runs the stand-in tests.
    instead = "[ $2 != tests.hosts ] || set -- -m tests.report step 0 tests/unit -q"
    python.write_text(f'#!/bin/sh\n{instead}\nPYTHONPATH={repo} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "deploy" / "connector").mkdir(parents=True)
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_it.py").write_text("def test_it(): assert False\n")
    shutil.copy(repo / "scripts" / "test", tmp_path / "scripts")
    done = subprocess.run(
        (tmp_path / "scripts" / "test", "quick"),
        env={**os.environ, "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()
    assert last[-1].startswith(f"error: {step} failed; ")
    assert any(line.startswith("machine: ") for line in last)
    assert ("failed: tests/unit/test_it.py::test_it" in last) == (step == "unit")
