"""The steps of scripts/test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deploy.runtime.host import machine_memory_mib
from tests.hosts.__main__ import DEALT
from tests.report.lanes import Step
from tests.report.passed import E2E

# Two engines a stack, of up to 3 GiB.
_MEMORY_OF_THREE_STACKS_MIB = 20 * 1024
# The disguise in which no test is left out for want of root.
QUICK_ON = ("large",)
CONNECTOR = ("mypy", "--config-file", "../../pyproject.toml", "-p", "pdkit_connector")


def steps(
    began_s: float, *, quick: bool, without: frozenset[str], full: bool = False
) -> tuple[list[Step], list[Step]]:
    """Return the steps in turn, and those beside them.

    Args:
        began_s: when the run began, on the monotonic clock.
        quick: without the end-to-end tests, and the unit tests on one disguised machine.
        full: all unit tests on both disguised machines.
        without: parts of a run that are left out, of those in passed.py.
    """

    def tests(name: str, *options: str) -> Step:
        told = (sys.executable, "-m", "tests.report", "step", str(began_s), *options)
        return Step(name, (told,))

    shown = [
        Step(
            "lint",
            (
                _tool("ruff", "check"),
                _tool("ruff", "format", "--check"),
                (
                    "env",
                    "PYTHONPATH=deploy/connector:deploy/router",
                    *_tool("lint-imports", "--no-logo"),
                ),
                _tool("zizmor", "--offline", "--quiet", ".github"),
            ),
        )
    ]
    shown.append(
        # Its limits are in tenths of a second, so not at the low priority of what runs beside. Half
        # of it is waiting, which the others use; the file with the heaviest imports comes first.
        tests(
            "connector", "tests/connector",
            "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder",
        )
    )  # fmt: skip
    if os.getuid() == 0:
        # On two disguised machines at once: who can make them need not run the tests on this one.
        machines = QUICK_ON if quick else () if full else (DEALT,)
        # A third of their time is waiting, so that two processes would leave a core idle.
        workers = "4" if quick else "3"
        disguised = (sys.executable, "-m", "tests.hosts", *machines, "--", "-q", "-n", workers)
        shown.append(Step("unit", ((*disguised, "--dist", "loadfile"),)))
    else:
        print("not root: the unit tests run on this machine as it is, not on disguised ones")
        shown.append(tests("unit", "tests/unit", "-q", "-n", "4", "--dist", "loadfile"))
    # Each fix on each LMCache, in forks of one process. The cells' limits of a minute are too short
    # on a slow machine beside the end-to-end tests, which leave nothing of the cores.
    shown.append(tests("versions", "tests/versions", "-q"))
    if not quick:
        # In their order, which has the longest first.
        stacks = 3 if machine_memory_mib() > _MEMORY_OF_THREE_STACKS_MIB else 2
        longest_first = ("--no-loadscope-reorder", "--durations=0")
        ignored = (f"--ignore={file}" for part in without & E2E.keys() for file in E2E[part])
        shown.append(tests("e2e", "tests/e2e", "-v", "-n", str(stacks), *longest_first, *ignored))
    beside = [
        Step("types", (_tool("mypy"), ("env", "--chdir=deploy/connector", *_tool(*CONNECTOR)))),
        # Fails on a link or an anchor that leads nowhere.
        Step("docs", (("env", "NO_MKDOCS_2_WARNING=1", *_tool("mkdocs", "build", "--strict")),)),
        tests("fuzz", "tests/fuzz", "-q"),
        # What images are built from, held against the package index.
        tests("images", "tests/images", "-q", "-n", "3"),
        # The Python code of the CUDA wheels, on emulated GPUs.
        tests("gpu", "tests/gpu", "-q"),
    ]
    return _without(shown, without), _without(beside, without)


def _without(found: list[Step], names: frozenset[str]) -> list[Step]:
    return [step for step in found if step.name not in names]


def _tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).with_name(name)), *arguments)
