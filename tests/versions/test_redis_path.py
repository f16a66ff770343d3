"""The Redis path is a plug-in of every LMCache that has the point for it."""

from __future__ import annotations

import pytest

from tests.versions.installed import passed_with

# The oldest with the point, one in between, and that of the GPU images.
RELEASES = ("0.3.12", "0.4.7", "0.5.3")
PARTS = "stored_is_loaded or first_hole or without_blocking or memory_is_given or wrong_setting"


@pytest.mark.parametrize("release", RELEASES)
def test_the_plug_in_works_with(release: str) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    said = passed_with(release, "tests/connector/test_redis_path_backend.py", "-k", PARTS)
    assert "8 passed" in said
