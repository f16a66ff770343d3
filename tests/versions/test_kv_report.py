"""An engine's report of its KV is made of what every LMCache has."""

from __future__ import annotations

import pytest

from tests.versions.installed import VERSIONS, passed_with

# The oldest has no point for plug-ins, and so none of the kit's own client.
WITHOUT_PLUG_INS = VERSIONS[:1]


@pytest.mark.parametrize("release", VERSIONS)
def test_the_report_on(release: str) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    options = ("-k", "not kits_own") if release in WITHOUT_PLUG_INS else ()
    said = passed_with(release, "tests/connector/test_kv_report.py", *options)
    assert f"{10 if release in WITHOUT_PLUG_INS else 11} passed" in said
