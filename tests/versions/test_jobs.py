"""A job that proves nothing of its release fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.versions import jobs
from tests.versions.forks import shared_output
from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job, Releases

ONE_TEST = ("tests/connector/test_kv_report.py", "-k", "changed_setting")


def test_another_lmcache_than_the_releases_own(
    releases: Releases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A release without LMCache's modules leaves those that are installed."""
    monkeypatch.setattr(jobs, "installed", lambda _release: tmp_path)
    job = Job("empty", ONE_TEST)
    releases.begin([job])
    with pytest.raises(AssertionError, match=f"(?s)1 passed.*not of {tmp_path}"):
        releases.said(job)


def test_no_test_was_run(releases: Releases) -> None:
    job = Job(VERSIONS[-1], (*ONE_TEST[:2], "not test"))
    releases.begin([job])
    with pytest.raises(AssertionError, match="ended with 5"):
        releases.said(job)


def test_the_process_is_killed() -> None:
    with Releases() as own:
        job = Job(VERSIONS[-1])
        own.begin([job])
        os.kill(own._process.pid, signal.SIGKILL)
        with pytest.raises(AssertionError, match="ended with -9"):
            own.said(job)


def test_processes_of_a_job_that_write_at_once_lose_no_line() -> None:
    """Untouched and fixed cells run side by side, and tell in the same file."""
    lines, output = 20_000, shared_output()
    children = []
    for number in range(2):
        if (child := os.fork()) == 0:
            for line in range(lines):
                os.write(output, f"{number} {line}\n".encode())
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(output) as text:
        text.seek(0)
        assert len(set(text)) == 2 * lines
