"""The matrix: each release of LMCache with each bug's cell, before and after the fix."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.versions.installed import VERSIONS, installed
from tests.versions.reference import page

HERE = Path(__file__).parent
CONNECTOR = REPO / "deploy" / "connector"
CELLS = sorted(path.stem for path in (CONNECTOR / "pdkit_connector" / "fixes").glob("b*.py"))
REFERENCE = REPO / "docs" / "reference" / "fixes.md"

Sides = dict[str, dict[str, Any]]
Trials = Callable[[str], dict[str, Sides]]


@contextmanager
def own_redis() -> Iterator[int]:
    """Run a real Redis, since cells empty it; give its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    server = subprocess.Popen(("redis-server", *options), stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


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


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Trials:
    """Return a release's cell → side → result; several releases at a time."""
    wanted = {item.callspec.params.get("version") for item in request.session.items
              if hasattr(item, "callspec")}  # fmt: skip
    # Half of a trial is waiting for what never ends.
    pool = ThreadPoolExecutor(2 * (os.cpu_count() or 1))
    every = len(wanted & set(VERSIONS)) != 1
    under_way = {
        version: pool.submit(trial, version) for version in VERSIONS if every or version in wanted
    }
    return lambda version: under_way[version].result()


def trial(version: str) -> dict[str, Sides]:
    """Run all cells on one release."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(installed(version)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }
    with own_redis() as port:
        command = (sys.executable, str(HERE / "trial.py"), "--redis-port", str(port))
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Sides] = {}
    for result in map(json.loads, done.stdout.splitlines()):
        found.setdefault(result["cell"], {})[result["side"]] = result
    return found


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
@pytest.mark.parametrize("version", VERSIONS)
def test_fix_where_the_bug_is_and_only_there(version: str, cell: str, trials: Trials) -> None:
    assert verdict(trials(version)[cell])


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
    assert connector("releases").PROVED == VERSIONS
