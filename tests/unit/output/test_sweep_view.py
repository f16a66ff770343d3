"""A sweep as people read it."""

from __future__ import annotations

from pathlib import Path

from deploy.benchmark.sweep import judge
from deploy.output.sweep_view import dry_run_view, sweep_view
from tests.unit.benchmark.test_sweep import run, sweep, times


def test_a_dry_run_lists_the_runs_and_their_time() -> None:
    planned = sweep({"4a": [], "1p3d": []}, rounds=1, refused={"1a:tp4": "4 does not divide"})
    lines = dry_run_view(planned, 120).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["1", "of", "1", "4a"],
        ["1", "of", "1", "1p3d"],
    ]
    assert lines[-2] == "left out: 1a:tp4: 4 does not divide"
    assert lines[-1].startswith("2 runs, about 2 min")


def test_the_best_comes_first_and_a_failure_has_its_reason() -> None:
    found = sweep({"4a": times(10), "1p3d": times(14)[::-1], "2p2d": []})
    found = found.model_copy(update={"runs": [*found.runs, run("2p2d", 0, None, "it exited")]})
    found = found.model_copy(update={"verdict": judge(found)})
    lines = sweep_view(found, Path("/r"), Path("/r/best.yaml"), "/r/report.html").splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1p3d", "4a", "2p2d"]
    assert "2p2d: it exited" in lines
    assert lines[-4].startswith("1p3d holds 1.4")
    assert lines[-2] == "Report: /r/report.html"
    assert lines[-1] == "Start it: deploy up -f /r/best.yaml"
