"""An engine's report of its KV is made of what every LMCache has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.versions.installed import VERSIONS, installed

# The oldest has no point for plug-ins, and so none of the kit's own client.
WITHOUT_PLUG_INS = VERSIONS[:1]


@pytest.mark.parametrize("release", VERSIONS)
def test_the_report_on(release: str) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if release in WITHOUT_PLUG_INS:
        command += ["-k", "not kits_own"]
    ran = subprocess.run(
        [*command, "tests/connector/test_kv_report.py"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(installed(release)), "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert f"{10 if release in WITHOUT_PLUG_INS else 11} passed" in ran.stdout
