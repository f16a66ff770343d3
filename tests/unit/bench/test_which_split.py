"""Sweeps as they stand on the results page."""

from __future__ import annotations

from pathlib import Path

from bench.which_split import section
from deploy.benchmark.results import write_result
from deploy.benchmark.sweep import judged, write_sweep
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_sweep import run, sweep, times


def test_a_sweep_has_its_command_machine_rates_and_verdict(tmp_path: Path) -> None:
    found = sweep({"4a": times(10), "1p3d": times(14)[::-1], "2p2d": []})
    first = found.runs[0].model_copy(update={"folder": "one"})
    runs = [first, *found.runs[1:], run("2p2d", 0, None, "it exited")]
    found = found.model_copy(update={"runs": runs})
    write_sweep(tmp_path, judged(found))
    (tmp_path / "one").mkdir()
    write_result(tmp_path / "one", result())
    lines = section(tmp_path).splitlines()
    assert lines[0] == "## pdkit-tiny, random"
    assert "deploy bench sweep" in lines
    assert any(line.endswith("11 runs took 11 min.") and "4,096 bytes" in line for line in lines)
    table = [line for line in lines if line.startswith("| `")]
    assert [line.split("|")[1:3] for line in table] == [
        [" `1p3d` ", " 14.00 "], [" `4a` ", " 10.00 "], [" `2p2d` ", " it exited "],
    ]  # fmt: skip
    assert lines[-1].startswith("> 1p3d holds 1.4")
