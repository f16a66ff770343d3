"""A folder of results for each test, and pytest run as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDKIT_TEST_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"
