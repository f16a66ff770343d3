"""The matrix: each release of LMCache with each bug's cell, before and after the fix."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.versions.installed import VERSIONS
from tests.versions.jobs import Job
from tests.versions.reference import page

HERE = Path(__file__).parent
CONNECTOR = REPO / "deploy" / "connector"
CELLS = sorted(path.stem for path in (CONNECTOR / "pdkit_connector" / "fixes").glob("b*.py"))
REFERENCE = REPO / "docs" / "reference" / "fixes.md"

Sides = dict[str, dict[str, Any]]
Trials = Callable[[str], dict[str, Sides]]


def connector(module: str) -> Any:
    """Import a module of the connector, which needs no LMCache for that."""
    if str(CONNECTOR) not in sys.path:
        sys.path.insert(0, str(CONNECTOR))
    return importlib.import_module(f"pdkit_connector.{module}")


def fix_of(cell: str) -> Any:
    return connector(f"fixes.{cell}").FIX


def natural(fix_id: str) -> tuple[int, str]:
    """Sort B2b before B15."""
    number = re.search(r"\d+", fix_id)
    return int(number.group()) if number else 0, fix_id


job = Job  # all cells


@pytest.fixture(scope="module")
def trials(said: Callable[[str], str]) -> Trials:
    """Return a release's cell → side → result."""

    @cache
    def trial(release: str) -> dict[str, Sides]:
        found: dict[str, Sides] = {}
        for line in said(release).splitlines():
            if line.startswith('{"cell": '):
                result = json.loads(line)
                found.setdefault(result["cell"], {})[result["side"]] = result
        return found

    return trial


def verdict(sides: Sides) -> str:
    """Return the matrix's word for a cell; raise AssertionError where fix and bug do not agree."""
    before, after = sides["untouched"], sides["fixed"]
    told = f"untouched {before['result']} ({before['detail']}), then {after}"
    if before["result"] == "failed":
        if after["result"] == "refused":
            return "guarded"
        assert (after["result"], after["state"]) == ("passed", "applied"), told
        return "fixed"
    if before["result"] == "not here":
        assert after.get("state") in ("not needed", "not applicable"), told
        return "not here"
    assert (before["result"], after["result"]) == ("passed", "passed"), told
    assert after["state"] == "not needed", told
    return "not needed"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("release", VERSIONS)
def test_fix_where_the_bug_is_and_only_there(release: str, cell: str, trials: Trials) -> None:
    assert verdict(trials(release)[cell])


@pytest.mark.parametrize("cell", CELLS)
def test_bug_is_in_some_release(cell: str, trials: Trials) -> None:
    verdicts = {verdict(trials(version)[cell]) for version in VERSIONS}
    assert verdicts & {"fixed", "guarded"}, (
        f"no release fails the cell, so it proves nothing: {verdicts}"
    )


def test_reference_is_current(trials: Trials) -> None:
    fixes = {name: fix_of(name) for name in CELLS}
    verdicts = {
        (fix.id, version): verdict(trials(version)[name])
        for name, fix in fixes.items()
        for version in VERSIONS
    }
    wanted = page(sorted(fixes.values(), key=lambda fix: natural(fix.id)), VERSIONS, verdicts)
    if os.environ.get("UPDATE_GOLDENS"):
        REFERENCE.write_text(wanted + "\n", encoding="utf-8")
    assert REFERENCE.read_text(encoding="utf-8") == wanted + "\n"


def test_connector_names_the_releases_it_was_proved_on() -> None:
    assert connector("releases").TESTED == VERSIONS
