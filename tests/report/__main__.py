"""What scripts/test calls once it has installed what the steps need, and what steps call.

python -m tests.report run SECONDS [quick | full]
python -m tests.report step BEGAN PATH [pytest's options]

SECONDS is how long the run took before, BEGAN when it began, on the monotonic clock.
"""

from __future__ import annotations

import sys
import time
from xml.etree import ElementTree

from tests.report.lanes import Ended, Run
from tests.report.machine import machine
from tests.report.passed import E2E, PARTS, unchanged, write_down
from tests.report.results import FAILED, empty_results, results_folder
from tests.report.step import run_step
from tests.report.steps import steps

_NAME = 1 + max(map(len, PARTS))  # the column of steps and parts


def main(command: str, seconds: str, *arguments: str) -> int:
    if command == "step":
        path, *options = arguments
        return run_step(path, options, began_s=float(seconds))
    empty_results()
    installed_s = float(seconds)
    run = Run(time.monotonic() - installed_s, [Ended("install", 0, installed_s, 0)])
    quick, full = (arguments == (kind,) for kind in ("quick", "full"))
    without = frozenset() if full else unchanged()
    stopped = True
    try:
        run.both(*steps(run.began_s, quick=quick, without=without, full=full))
        stopped = False
    finally:
        print("\n".join(end(run.ended, run.seconds(), stopped=stopped, without=without)))
    write_down(_passed(run) - without)
    return 1 if run.failed else 0


def _passed(run: Run) -> set[str]:
    """Return the parts of passed.py that ran and passed."""
    steps_passed = {step.name for step in run.ended if not step.code}
    return {part for part in PARTS if ("e2e" if part in E2E else part) in steps_passed}


def end(
    ended: list[Ended],
    took_s: float,
    *,
    stopped: bool = False,
    without: frozenset[str] = frozenset(),
) -> list[str]:
    """Return what a run ends with; also written as a case a step for JUnit.

    Args:
        stopped: somebody stopped the run before its end.
        without: parts that were left out.
    """
    ended = sorted(ended, key=lambda step: step.began_s)
    _write_junit(ended)
    failed = results_folder() / FAILED
    bad = ", ".join(step.name for step in ended if step.code)
    problem = f"{bad} failed" if bad else "stopped before its end" if stopped else ""
    return [
        "",
        *(
            f"{step.name:<{_NAME}}{step.ended_s - step.began_s:>6.0f} s, from {step.began_s:.0f} s"
            f"{' failed' if step.code else ''}"
            for step in ended
        ),
        f"{'in all':<{_NAME}}{took_s:>6.0f} s",
        *(
            f"{part:<{_NAME}}left out: its files are those of its last pass "
            "(scripts/test full runs it)"
            for part in sorted(without)
        ),
        f"machine: {machine()}",
        *(failed.read_text().splitlines() if failed.exists() else ()),
        f"error: {problem}; results: {results_folder()}" if problem else "all passed",
    ]


def _write_junit(ended: list[Ended]) -> None:
    suite = ElementTree.Element("testsuite", name="scripts/test", tests=str(len(ended)))
    for step in ended:
        took = f"{step.ended_s - step.began_s:.0f}"
        case = ElementTree.SubElement(suite, "testcase", name=step.name, time=took)
        if step.code:
            ElementTree.SubElement(case, "failure", message="see this step's output")
    ElementTree.ElementTree(suite).write(results_folder() / "steps.xml")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
