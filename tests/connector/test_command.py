"""`python -m pdkit_connector`: what it prints."""

from __future__ import annotations

import json

from own_process import CONNECTOR, run_python
from pdkit_connector import __main__ as command
from pdkit_connector.registry import FixOutcome, FixState, discover

IDS = {fix.id for fix in discover()}


def test_it_prints_json_alone_and_marks_disabled_fixes():
    off = {"LMCACHE_TRACK_USAGE": "false", "PDKIT_DISABLE_FIXES": "B2c"}
    done = run_python("-m", "pdkit_connector", "--json", **off)
    told = json.loads(done.stdout)
    assert (told["lmcache"], told["tested"]) == ("0.5.6", True)
    states = {item["id"]: item["state"] for item in told["fixes"]}
    assert states.keys() == IDS
    assert states.pop("B2c") == "disabled"
    assert set(states.values()) <= {"applied", "guarded", "not needed", "not applicable"}
    assert states["B17"] == "applied"
    assert all(item["evidence"] and item["link"] for item in told["fixes"])


def test_it_prints_a_table(monkeypatch, capsys):
    outcomes = tuple(FixOutcome(fix, FixState.APPLIED, f"seen of {fix.id}") for fix in discover())
    monkeypatch.setattr(command, "_require_engine", lambda: None)
    monkeypatch.setattr(command.gc, "disable", lambda: None)
    monkeypatch.setattr(command.Registry, "apply", lambda *_: outcomes)
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert len(outcomes) == len(IDS)
    for fix in (outcome.fix for outcome in outcomes):
        head = f"{fix.id:<5} {'applied':<15} {fix.title} [{fix.link}]"
        assert f"{head}\n{'':<22}seen of {fix.id}\n" in printed


def test_a_broken_vllm_is_reported_and_not_as_failed_fixes(tmp_path):
    package = tmp_path / "vllm" / "config"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    path = f"{CONNECTOR}:{tmp_path}"
    broken = run_python("-m", "pdkit_connector", "--json", code=1, PYTHONPATH=path)
    assert broken.stdout == ""
    assert "ImportError" in broken.stderr and "VllmConfig" in broken.stderr
