"""The Redis path is a plug-in of every LMCache that has the point for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job

# The installed release runs these tests anyway.
RELEASES = VERSIONS[:-1]
PARTS = "found_and_loaded or first_missing_chunk or without_blocking or frees_its_memory"
# What may be loaded is read off each release's own metadata.
PARTS += " or wrong_setting or hide_good_ones or own_tensor"
FILES = tuple(f"tests/connector/test_redis_path_{name}.py" for name in ("backend", "forged"))


def job(release: str) -> Job:
    return Job(release, (*FILES, "-k", PARTS))


@pytest.mark.parametrize("release", RELEASES)
def test_the_plug_in_works_with(release: str, said: Callable[[str], str]) -> None:
    """The same tests that the installed release passes, in a process that has another one."""
    assert "14 passed" in said(release)
