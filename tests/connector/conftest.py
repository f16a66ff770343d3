"""Run against the LMCache and torch of the interpreter in use; both must be importable."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"
sys.path.insert(0, str(CONNECTOR))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that notes attributes which a fix replaces; they are put back after."""

    def note(owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))

    yield note


@pytest.fixture
def record_factory_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what B15 does to logging and to stderr."""
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    yield
    logging.setLogRecordFactory(factory)
