"""The Redis path is a plug-in of every LMCache that has the point for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.versions.installed import installed

# The oldest with the point, one in between, and that of the GPU images.
RELEASES = ("0.3.12", "0.4.7", "0.5.3")
PARTS = "stored_is_loaded or first_hole or without_blocking or memory_is_given or wrong_setting"


@pytest.mark.parametrize("release", RELEASES)
def test_the_plug_in_works_with(release: str) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", PARTS)
    ran = subprocess.run(
        (*command, "tests/connector/test_redis_path_backend.py"),
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(installed(release)), "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "8 passed" in ran.stdout
