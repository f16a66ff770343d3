"""The releases of LMCache, each in a fork of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job, Releases


@pytest.fixture(scope="session")
def releases() -> Iterator[Releases]:
    with Releases() as started:
        yield started


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, releases: Releases) -> Callable[[str], str]:
    """Return what the module's job said on a release; jobs of all its tests are done at once."""
    job: Callable[[str], Job] = request.module.job
    wanted = set[str]()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            one = item.callspec.params.get("release") if hasattr(item, "callspec") else None
            wanted.update((one,) if one else VERSIONS)
    releases.begin([job(release) for release in VERSIONS if release in wanted])
    return lambda release: releases.said(job(release))
