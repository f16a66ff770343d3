"""Python in a process of its own: for what a process imports or changes once and for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"


def run_python(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the connector on its path; fail where it ends with another exit code."""
    done = subprocess.run(
        (sys.executable, *arguments),
        env={**os.environ, "PYTHONPATH": str(CONNECTOR), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def last_line(*arguments: str, **environ: str) -> str:
    """Return the last line that a script prints; libraries may print before it."""
    return run_python("-c", *arguments, **environ).stdout.splitlines()[-1]
