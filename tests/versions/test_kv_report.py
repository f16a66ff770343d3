"""An engine's report of its KV is made of what every LMCache has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job


def job(release: str) -> Job:
    return Job(release, ("tests/connector/test_kv_report.py",))


@pytest.mark.parametrize("release", VERSIONS)
def test_the_report_on(release: str, said: Callable[[str], str]) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    assert "11 passed" in said(release)
