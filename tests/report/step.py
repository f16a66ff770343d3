"""Run the tests of one step; repeat those that fail, to tell flaky ones from broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.report.results import FAILED, results_folder

AT_MOST = 10
# CI ends a run after 90 minutes.
DEADLINE_S = 75 * 60
# Tests of one file share a stack, and each finds it as those before it leave it.
IN_ORDER = "e2e"


@dataclass(eq=False)  # pytest keeps plugins in sets
class Outcomes:
    """A plugin that notes what became of each test.

    Attributes:
        failed: those that failed, at any stage.
        seconds: test → how long it took, in the order of the run.
    """

    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def run_step(path: str, options: Sequence[str], *, began_s: float) -> int:
    """Run the tests below a path; return pytest's exit code, also where all pass when repeated.

    Args:
        began_s: when the run began, on the monotonic clock.
    """
    name = Path(path).stem
    code, first = _run(name, [path, *options])
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    chosen = first.failed[:AT_MOST]
    repeated = to_repeat(chosen, first, in_order=IN_ORDER in Path(path).parts)
    needed_s = sum(first.seconds[test] for test in repeated)
    if time.monotonic() - began_s + needed_s > DEADLINE_S:
        why = f"not repeated: that may take {needed_s / 60:.0f} min, too long for CI"
        _tell([f"failed: {test} ({why})" for test in first.failed])
        return code
    print(f"\n== {name}: once again what failed, to see whether it always does", flush=True)
    _, again = _run(f"{name}-again", [*repeated, *options])
    _tell([verdict(test, again) for test in chosen])
    _tell([f"failed: {test} (not repeated: {AT_MOST} were)" for test in first.failed[AT_MOST:]])
    return code


def to_repeat(failed: Sequence[str], first: Outcomes, *, in_order: bool) -> list[str]:
    """Return the tests that failed; `in_order`, also those before them in their files."""
    if not in_order:
        return list(failed)
    order = list(first.seconds)
    last = {_file(test): number for number, test in enumerate(order) if test in failed}
    return [test for number, test in enumerate(order) if number <= last.get(_file(test), -1)]


def verdict(test: str, again: Outcomes) -> str:
    if test not in again.seconds:
        return f"failed: {test} (not repeated: pytest did not come to it)"
    return f"failed: {test}" if test in again.failed else f"flaky: {test}"


def _run(name: str, arguments: Sequence[str]) -> tuple[int, Outcomes]:
    """Run pytest in an interpreter of its own: modules keep what an earlier run left in them."""
    junit = f"--junitxml={results_folder() / name}.xml"
    with tempfile.NamedTemporaryFile("r", prefix="pdkit-outcomes-") as file:
        command = (sys.executable, "-m", __spec__.name, file.name, junit, *arguments)
        code = subprocess.run(command, check=False).returncode
        return code, Outcomes(**json.loads(file.read() or "{}"))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _tell(lines: Sequence[str]) -> None:
    with (results_folder() / FAILED).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    noted = Outcomes()
    ended = pytest.main(sys.argv[2:], plugins=[noted])
    Path(sys.argv[1]).write_text(json.dumps(vars(noted)))
    sys.exit(ended)
