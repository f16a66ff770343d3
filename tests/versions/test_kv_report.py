"""An engine's report of its KV is made of what every LMCache has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job

# The oldest has no point for plug-ins, and so none of the kit's own client.
WITHOUT_PLUG_INS = VERSIONS[:1]


def job(release: str) -> Job:
    options = ("-k", "not kits_own") if release in WITHOUT_PLUG_INS else ()
    return Job(release, ("tests/connector/test_kv_report.py", *options))


@pytest.mark.parametrize("release", VERSIONS)
def test_the_report_on(release: str, said: Callable[[str], str]) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    assert f"{10 if release in WITHOUT_PLUG_INS else 11} passed" in said(release)
