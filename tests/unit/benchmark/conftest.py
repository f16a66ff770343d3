"""A server for the generator, whose clock the two share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.benchmark import load, stream
from tests.unit.benchmark.streaming import Stage, serving


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Return the server; the generator measures by its clock."""
    with serving(Stage()) as made:
        monkeypatch.setattr(load, "time", made.clock)
        monkeypatch.setattr(stream, "time", made.clock)
        yield made
