"""Which files of unit tests run on which simulated machine, where not all run on both."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.hosts.disguises import DISGUISES
from tests.hosts.host import REPO

UNIT = "tests/unit"
# What reads the machine: on both in every run.
ON_BOTH = (
    "config", "doctor", "planning", "runtime", "scripts", "stack/test_compose_accepted.py",
    "test_hosts.py", "workflows/test_doctor.py", "workflows/test_facts.py",
)  # fmt: skip
# The slowest of the others, by two: one of each pair on either machine, so that both take as long.
PAIRS = (
    ("workflows/test_supervise.py", "workflows/test_export.py"),
    ("workflows/test_check.py", "workflows/test_cluster_check.py"),
    ("workflows/test_swap.py", "cli/test_bad_input.py"),
    ("workflows/test_up_and_down.py", "workflows/test_own_redis.py"),
    ("router/test_faults.py", "workflows/test_several_hosts.py"),
)


def left_to_others(machine: str, commit: str, files: Iterable[str]) -> list[str]:
    """Return the files that another machine runs for this commit.

    Every file runs on one machine at least, on which one changes with the commit: what passes on
    one machine only is found within a few commits, and by `scripts/test full` at once.
    """
    return [file for file in files if machine not in _machines(file, commit)]


def unit_files(root: Path = REPO) -> list[str]:
    return sorted(str(file.relative_to(root)) for file in (root / UNIT).rglob("test_*.py"))


def this_commit(root: Path = REPO) -> str:
    """Return the commit of the checkout; "" where git knows none."""
    command = ("git", "-C", str(root), "rev-parse", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _machines(file: str, commit: str) -> tuple[str, ...]:
    below = file.removeprefix(f"{UNIT}/")
    if below in ON_BOTH or below.split("/")[0] in ON_BOTH:
        return tuple(DISGUISES)
    pair = next((pair for pair in PAIRS if below in pair), (below,))
    drawn = hashlib.sha256(f"{commit} {pair[0]}".encode()).digest()[0] + pair.index(below)
    return (list(DISGUISES)[drawn % len(DISGUISES)],)
