"""What scripts/test calls: at its begin, for each step with tests, and at its end."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

from tests.report.machine import machine
from tests.report.results import FAILED, empty_results, results_folder
from tests.report.step import run_step


def main(command: str, *arguments: str) -> int:
    if command == "begin":
        empty_results()
    elif command == "step":
        elapsed_s, path, *options = arguments
        return run_step(path, options, elapsed_s=float(elapsed_s))
    else:
        status, *steps, ended_s = arguments
        print("\n".join(end(int(status), steps, int(ended_s))))
    return 0


def end(status: int, steps: list[str], ended_s: int) -> list[str]:
    """Return what a run ends with; also written as a case a step for JUnit.

    Args:
        status: how the run ends; not 0 where its last step failed.
        steps: each step and the second in which it began, in turn.
    """
    names, began = steps[::2], [int(second) for second in steps[1::2]]
    took = {
        name: until - since
        for name, since, until in zip(names, began, [*began[1:], ended_s], strict=True)
    }
    bad = names[-1] if status and names else ""
    _write_junit(took, bad)
    rows = [f"{name:<12}{s:>6} s{'  failed' if name == bad else ''}" for name, s in took.items()]
    failed = results_folder() / FAILED
    return [
        "",
        *rows,
        f"{'in all':<12}{ended_s:>6} s",
        f"machine: {machine()}",
        *(failed.read_text().splitlines() if failed.exists() else ()),
        f"error: {bad} failed; results: {results_folder()}" if status else "all passed",
    ]


def _write_junit(took: dict[str, int], bad: str) -> None:
    suite = ElementTree.Element("testsuite", name="scripts/test", tests=str(len(took)))
    for name, seconds in took.items():
        case = ElementTree.SubElement(suite, "testcase", name=name, time=str(seconds))
        if name == bad:
            ElementTree.SubElement(case, "failure", message="see this step's output")
    ElementTree.ElementTree(suite).write(results_folder() / "steps.xml")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
