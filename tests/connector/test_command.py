"""`python -m pdkit_connector`: what it prints, and that it finds in less time what takes more.

It looks at vLLM without the compilers; a whole import finds the same. Each run imports vLLM and
takes seconds, so tests share what they can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pdkit_connector import __main__ as command
from pdkit_connector.registry import Outcome, State, discover

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"
IDS = {fix.id for fix in discover()}

# The command, and then where the heavy modules are from.
WHAT_IS_LEFT_OUT = """
import runpy, sys
from pdkit_connector.light_imports import HEAVY
try:
    runpy.run_module("pdkit_connector", run_name="__main__", alter_sys=True)
finally:
    print(*(getattr(sys.modules.get(n), "__file__", None) for n in HEAVY[1:]), file=sys.stderr)
"""
STAND_INS_REFUSED = """
import sys
import pdkit_connector.light_imports as light, pdkit_connector.__main__ as command
def refuse(*_): raise RuntimeError("vLLM looked into a stand-in")
light._Module.__getattr__ = refuse
assert not light.import_adapter()
print("refused", file=sys.stderr)
command.main(["--json"])
"""


def ran(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which the fixes then change."""
    return subprocess.run(
        (sys.executable, *arguments),
        env={
            **os.environ,
            "PYTHONPATH": f"{CONNECTOR}:{path}",
            "LMCACHE_TRACK_USAGE": "false",
            "PDKIT_DISABLE_FIXES": "B2c",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def light():
    return ran("-c", WHAT_IS_LEFT_OUT, "--json")


@pytest.fixture(scope="module")
def refused():
    return ran("-c", STAND_INS_REFUSED)


def test_it_prints_json_alone_and_marks_disabled_fixes(light):
    assert light.returncode == 0, light.stderr
    told = json.loads(light.stdout)
    assert (told["lmcache"], told["proved"]) == ("0.5.6", True)
    states = {item["id"]: item["state"] for item in told["fixes"]}
    assert states.keys() == IDS
    assert states.pop("B2c") == "disabled"
    assert set(states.values()) <= {"applied", "guarded", "not needed", "not applicable"}
    assert states["B17"] == "applied"
    assert all(item["evidence"] and item["link"] for item in told["fixes"])


def test_what_it_leaves_out_is_left_out(light):
    assert light.stderr.splitlines()[-1].split() == ["None"] * 3, light.stderr[-2000:]


def test_a_vllm_that_uses_what_it_imports_gets_the_real_ones(refused):
    """Then the command begins again with --slow."""
    assert refused.returncode == 0, refused.stderr
    assert "\nrefused\n" in f"\n{refused.stderr}"


def test_it_finds_the_same(light, refused):
    assert json.loads(light.stdout) == json.loads(refused.stdout)


def test_it_prints_a_table(monkeypatch, capsys):
    outcomes = tuple(Outcome(fix, State.APPLIED, f"seen of {fix.id}") for fix in discover())
    monkeypatch.setattr(command, "import_adapter", lambda: True)
    monkeypatch.setattr(command, "_require_engine", lambda: None)
    monkeypatch.setattr(command.gc, "disable", lambda: None)
    monkeypatch.setattr(command.Registry, "apply", lambda *_: outcomes)
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert len(outcomes) == len(IDS)
    for fix in (outcome.fix for outcome in outcomes):
        head = f"{fix.id:<5} {'applied':<15} {fix.title} [{fix.link}]"
        assert f"{head}\n{'':<22}seen of {fix.id}\n" in printed


def test_a_broken_vllm_is_told_as_that_and_not_as_fixes_that_fail(tmp_path):
    package = tmp_path / "vllm" / "config"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    broken = ran("-m", "pdkit_connector", "--json", path=str(tmp_path))
    assert broken.returncode == 1
    assert broken.stdout == ""
    assert "ImportError" in broken.stderr and "VllmConfig" in broken.stderr
