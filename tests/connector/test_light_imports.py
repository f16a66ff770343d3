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


def test_a_vllm_that_uses_what_it_imports_gets_the_real_ones(whole):
    """Then it takes its time, and finds what it would have found at once."""
    script = (
        "import pdkit_connector.light_imports as light, pdkit_connector.__main__ as asked\n"
        "def refuse(*_): raise RuntimeError('vLLM looked into a stand-in')\n"
        "light._Module.__getattr__ = refuse\n"
        "assert not light.import_adapter()\n"
        "asked.main(['--json'])"
    )
    ran = run(script)
    assert json.loads(ran.stdout) == whole, ran.stderr[-2000:]


def test_a_broken_vllm_is_told_as_that_and_not_as_fixes_that_fail(tmp_path):
    package = tmp_path / "vllm" / "config"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    ran = asked(path=tmp_path)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "ImportError" in ran.stderr and "VllmConfig" in ran.stderr


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-c", script),
        env={**os.environ, "PYTHONPATH": str(CONNECTOR), "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
