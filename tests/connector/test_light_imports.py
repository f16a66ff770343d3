"""A look at the fixes without the compilers: it finds what a whole import finds, in less time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"


def asked(*options: str, path: Path | None = None):
    folders = [str(CONNECTOR), *([str(path)] if path else [])]
    return subprocess.run(
        (sys.executable, "-m", "pdkit_connector", "--json", *options),
        env={
            **os.environ,
            "PYTHONPATH": ":".join(folders),
            "LMCACHE_TRACK_USAGE": "false",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def whole():
    return json.loads(asked("--slow").stdout)


def test_it_finds_the_same(whole):
    assert json.loads(asked().stdout) == whole


def test_what_it_leaves_out_is_left_out():
    script = (
        "import sys; from pdkit_connector.light_imports import HEAVY, import_adapter\n"
        "assert import_adapter()\n"
        "print(*(getattr(sys.modules.get(n), '__file__', None) for n in HEAVY[1:]))"
    )
    ran = run(script)
    assert ran.stdout.splitlines()[-1].split() == ["None"] * 3, ran.stderr[-2000:]


def test_a_vllm_that_uses_what_it_imports_gets_the_real_ones(tmp_path):
    """Then the import takes its time, and nothing of the first attempt is left."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("import sympy\nassert sympy.Integer(2) + 3 == 5\n")
    script = (
        "import sys; from pdkit_connector.light_imports import import_adapter\n"
        "assert not import_adapter()\n"
        "assert 'vllm' not in sys.modules and 'sympy' not in sys.modules\n"
        "import vllm, sympy; print('real', bool(sympy.__file__))"
    )
    ran = run(script, tmp_path)
    assert ran.stdout.splitlines()[-1] == "real True", ran.stderr[-2000:]


def test_a_broken_vllm_is_told_as_that_and_not_as_fixes_that_fail(tmp_path):
    package = tmp_path / "vllm" / "config"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    ran = subprocess.run(
        (sys.executable, "-m", "pdkit_connector", "--json"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{CONNECTOR}", "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "ImportError" in ran.stderr and "VllmConfig" in ran.stderr


def run(script: str, *first: Path) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, (*first, CONNECTOR)))
    return subprocess.run(
        (sys.executable, "-c", script),
        env={**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
