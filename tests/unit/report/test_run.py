"""How a run of scripts/test begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.hosts.__main__ import DEALT
from tests.hosts.disguises import DISGUISES
from tests.report.__main__ import end, main
from tests.report.lanes import Ended, Run, Step
from tests.report.machine import machine
from tests.report.passed import E2E, PARTS
from tests.report.results import empty_results, results_folder
from tests.report.steps import steps

STEPS = [Ended("types", 7, 17, 0), Ended("install", 0, 5, 0), Ended("lint", 5, 7, 0)]


def steps_of(results: Path) -> ElementTree.Element:
    return ElementTree.parse(results / "steps.xml").getroot()  # noqa: S314 - written by ourselves


def test_a_run_ends_with_times_and_machine(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.report.__main__.machine", lambda: "a machine")
    lines = end(STEPS, 17)
    assert [line.split() for line in lines[1:5]] == [
        ["install", "5", "s,", "from", "0", "s"],
        ["lint", "2", "s,", "from", "5", "s"],
        ["types", "10", "s,", "from", "7", "s"],
        ["in", "all", "17", "s"],
    ]
    assert lines[5] == "machine: a machine"
    assert lines[6:] == ["all passed"]
    suite = steps_of(results)
    assert [case.get("time") for case in suite] == ["5", "2", "10"]
    assert suite.find("testcase/failure") is None


def test_a_run_ends_with_the_failed_steps(results: Path) -> None:
    (results_folder() / "failed.txt").write_text("flaky: a\nfailed: b\n")
    lines = end([*STEPS[1:], replace(STEPS[0], code=1)], 17)
    assert lines[3].split()[-1] == "failed"
    assert lines[6:] == ["flaky: a", "failed: b", f"error: types failed; results: {results}"]
    suite = steps_of(results)
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["types"]


def test_a_run_that_is_interrupted_reports_what_it_has(results: Path) -> None:
    assert end(STEPS, 17, stopped=True)[-1] == f"error: stopped before its end; results: {results}"


@pytest.mark.parametrize(
    ("flags", "named"),
    [("sse2", "no AVX2"), ("avx2", "AVX2"), ("avx2 avx512f amx_tile", "AVX2 AVX-512 AMX")],
)
def test_the_machine_is_described(tmp_path: Path, flags: str, named: str) -> None:
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


def test_a_run_begins_with_an_empty_folder(results: Path) -> None:
    (results_folder() / "logs").mkdir()
    (results / "failed.txt").touch()
    empty_results()
    assert [path.name for path in results.iterdir()] == [".pdkit-test-results"]


def test_a_folder_that_is_not_its_own_is_not_emptied(results: Path) -> None:
    results.mkdir()
    (results / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="holds other files"):
        empty_results()
    assert (results / "thesis.txt").exists()


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("user", [0, 1000])
def test_steps_are_in_order(monkeypatch: pytest.MonkeyPatch, user: int, quick: bool) -> None:
    monkeypatch.setattr("os.getuid", lambda: user)
    shown, beside = steps(3.0, quick=quick, without=frozenset())
    names = ["lint", "connector", "unit", "versions"] + ["e2e"] * (not quick)
    assert [step.name for step in shown] == names
    assert [step.name for step in beside] == ["types", "docs", "fuzz", "images", "gpu"]
    command = shown[2].commands[0]
    assert ("tests.hosts" in command) == (user == 0)
    assert [name for name in DISGUISES if name in command] == ["large"] * (quick and user == 0)
    assert (DEALT in command) == (user == 0 and not quick)
    whole, _ = steps(3.0, quick=quick, without=frozenset(), full=not quick)
    assert DEALT not in whole[2].commands[0], "all unit tests on both machines"


@pytest.mark.parametrize(("memory_mib", "stacks"), [(16_000, "2"), (24_000, "3")])
def test_the_number_of_stacks_follows_from_memory(
    monkeypatch: pytest.MonkeyPatch, memory_mib: int, stacks: str
) -> None:
    monkeypatch.setattr("tests.report.steps.machine_memory_mib", lambda: memory_mib)
    command = e2e(frozenset())
    assert command[command.index("-n") + 1] == stacks


def e2e(without: frozenset[str]) -> tuple[str, ...]:
    return steps(3.0, quick=False, without=without)[0][-1].commands[0]


def test_unchanged_parts_are_left_out() -> None:
    shown, beside = steps(3.0, quick=False, without=frozenset({"connector", "gpu"}))
    assert [step.name for step in shown] == ["lint", "unit", "versions", "e2e"]
    assert [step.name for step in beside] == ["types", "docs", "fuzz", "images"]
    for part, files in E2E.items():
        ignored = [option for option in e2e(frozenset({part, "versions"})) if "ignore" in option]
        assert ignored == [f"--ignore={file}" for file in files]
    assert "ignore" not in " ".join(e2e(frozenset({"versions"})))


def test_a_run_ends_with_the_parts_left_out(results: Path) -> None:
    lines = end(STEPS, 17, without=frozenset(PARTS))
    assert [line.split()[:3] for line in lines[5:-2]] == [
        [part, "left", "out:"] for part in sorted(PARTS)
    ]


@pytest.mark.parametrize(
    ("arguments", "failed", "written"),
    [
        ((), "", {*E2E, "connector", "gpu"}),
        (("full",), "", {*E2E, "connector", "versions", "gpu"}),
        (("full",), "e2e", {"connector", "versions", "gpu"}),
        (("quick",), "", {"connector", "gpu"}),
    ],
)
def test_passed_parts_are_recorded(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    failed: str,
    written: set[str],
) -> None:
    """The files of one part are those of its last pass."""
    found: set[str] = set()
    monkeypatch.setattr("tests.report.__main__.unchanged", lambda: frozenset({"versions"}))
    monkeypatch.setattr("tests.report.__main__.write_down", found.update)

    def both(run: Run, *lanes: list[Step]) -> None:
        names = [step.name for lane in lanes for step in lane]
        run.ended.extend(Ended(name, 0, 0, int(name == failed)) for name in names)

    monkeypatch.setattr(Run, "both", both)
    assert main("run", "3", *arguments) == int(bool(failed))
    assert found == written


class TestLanes:
    def test_both_lanes_run(self, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
        run = Run(time.monotonic() - 5)
        run.both(
            [script("a", "echo from a"), script("b", "echo from b")], [script("c", "echo from c")]
        )
        assert sorted(step.name for step in run.ended) == ["a", "b", "c"]
        assert all(5 <= step.began_s <= step.ended_s for step in run.ended)
        assert not run.failed
        told = capfd.readouterr().out
        assert all(f"from {name}\n" in told for name in "abc")
        assert (results / "c.log").read_text() == "from c\n"

    def test_the_second_lane_has_a_lower_priority(self, results: Path) -> None:
        Run().both([], [script("c", "nice")])
        assert (results / "c.log").read_text() == f"{min(os.nice(0) + 15, 19)}\n"

    def test_no_step_starts_after_a_failed_one(self) -> None:
        run = Run()
        run.both([script("a", "exit 3"), script("b", "true")], [])
        assert [(step.name, step.code) for step in run.failed] == [("a", 3)]
        assert [step.name for step in run.ended] == ["a"]

    def test_the_other_lane_starts_no_step_after_a_failure(self, tmp_path: Path) -> None:
        """The other lane's first step ends once the first lane's has failed."""
        gate = tmp_path / "gate"
        os.mkfifo(gate)

        class Ends(list[Ended]):
            def append(self, step: Ended) -> None:
                super().append(step)
                if step.name == "a":
                    gate.write_text("it has failed")

        run = Run(ended=Ends())
        run.both([script("a", "false")], [script("b", f"cat {gate}"), script("c", "true")])
        assert [step.name for step in run.ended] == ["a", "b"]

    def test_a_steps_second_command_is_left_out_where_its_first_fails(self, tmp_path: Path) -> None:
        ran = tmp_path / "ran"
        run = Run()
        run.both([Step("a", (("false",), ("touch", str(ran))))], [])
        assert [step.code for step in run.failed] == [1] and not ran.exists()

    def test_a_missing_command_fails_the_step(self) -> None:
        run = Run()
        run.both([], [Step("a", (("/does/not/exist",),))])
        assert [step.code for step in run.failed] == [127]

    def test_a_stopped_run_leaves_no_process(self, tmp_path: Path) -> None:
        """Its steps are ended with what they started."""
        fifo, code = tmp_path / "fifo", "from tests.report.lanes import Run, Step; import sys\n"
        os.mkfifo(fifo)
        # Whoever holds the pipe open lives.
        holds = f"(exec 3>{fifo}; sleep 600) & wait"
        code += f"Run().both([Step('a', (('sh', '-c', {holds!r}),))], [])"
        process = subprocess.Popen((sys.executable, "-c", code))
        with fifo.open("rb") as reader:
            process.terminate()
            assert reader.read() == b""
        assert process.wait() == 143


def script(name: str, text: str) -> Step:
    return Step(name, (("sh", "-c", text),))
