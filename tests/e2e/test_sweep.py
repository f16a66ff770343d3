"""`deploy bench sweep` on real engines: killed, it goes on, and nothing is left of it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from deploy.benchmark.results import read_result
from deploy.benchmark.sweep import read_sweep
from tests.e2e.conftest import Deploy
from tests.ports import free_row

HANGS_S = 300
SCHEMA = Path(__file__).resolve().parents[2] / "docs/reference/schemas/sweep.json"


def sweep_of(deploy: Deploy, out: Path, *more: str) -> tuple[str, ...]:
    load = ("--workload", "shared-prefix", "--input-tokens", "32", "--output-tokens", "4")
    split = ("--topologies", "1a,1p1d", "--rounds", "1", "--port", str(free_row()))
    # An SLO that every rate holds: how many are tried does not depend on the machine.
    search = ("--slo", "e2e=1000s", "--pass", "2", "--steps", "2")
    return ("bench", "sweep", *split, *load, *search, "--out", str(out), *more)


def wait_for_second_stack(deploy: Deploy, out: Path) -> None:
    deadline = time.monotonic() + HANGS_S
    state = deploy.home / "stacks" / "pdkit-sweep" / "state.json"
    while time.monotonic() < deadline:
        if (out / "sweep.json").exists() and read_sweep(out).runs and state.exists():
            return
        time.sleep(0.1)
    pytest.fail("the sweep did not come to its second stack")


def test_a_killed_sweep_continues_where_it_was(deploy: Deploy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = sweep_of(deploy, out)
    killed = deploy.start(*command)
    wait_for_second_stack(deploy, out)
    killed.send_signal(signal.SIGKILL)
    deploy.ended(killed)
    (first,) = read_sweep(out).runs
    done = deploy.run(*command, "--json")
    assert done.code == 0, done
    assert not deploy.processes("pdkit-sweep")
    assert not (deploy.home / "stacks" / "pdkit-sweep").exists()
    sweep = read_sweep(out)
    assert sweep.runs[0] == first, "what was finished is not run again"
    assert [(run.topology, run.error) for run in sweep.runs] == [("1a", None), ("1p1d", None)]
    for run in sweep.runs:
        low, high = read_result(out / str(run.folder)).repeats
        assert (low.rate or 0) < (high.rate or 0) == pytest.approx(run.rate or 0)
    assert sweep.verdict is not None
    assert sweep.verdict.sentence.startswith("Too few rounds to tell 1p1d from 1a")
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(
        json.loads((out / "sweep.json").read_text())
    )
    assert "Too few rounds to tell 1p1d from 1a" in (out / "report.html").read_text()
    plan = deploy.run("plan", "-f", str(out / "best.yaml"), "--json")
    assert json.loads(plan.stdout)["data"]["topology"] == "1a"
