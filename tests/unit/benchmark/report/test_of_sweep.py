"""The report of a sweep's folder has the sweep's own verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.benchmark.report.chart_data import named
from deploy.benchmark.report.page import page
from deploy.benchmark.report.verdict import sweep_of
from deploy.benchmark.sweep import judge, judged, write_sweep
from deploy.benchmark.verdict import BenchVerdict
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_sweep import sweep, times


def folders(place: Path, rates: dict[str, Sequence[float | None]]) -> list[Path]:
    one = sweep(rates)
    write_sweep(place, judged(one))
    return [place / "round-1-4a", place / "round-1-1p3d"]


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        (times(14)[::-1], "disaggregate"),
        (times(6)[::-1], "do not"),
        (times(10)[::-1], "no difference"),
        (times(14, 2), "cannot tell"),
    ],
)
def test_the_report_has_the_verdict_of_the_sweep(
    tmp_path: Path, split: list[float], kind: str
) -> None:
    found = sweep_of(folders(tmp_path, {"4a": times(10), "1p3d": split}))
    assert found is not None
    assert judge(found).kind == kind
    assert found.verdict is not None
    assert judge(found).sentence == found.verdict.sentence


def test_the_page_has_every_topology_the_best_first_and_why_one_has_no_rate(tmp_path: Path) -> None:
    (found,) = named([(result(), [])])
    none = BenchVerdict("one run", "One.")
    assert "<h2>Topologies" not in page([found], none, [], "")
    runs = folders(tmp_path, {"4a": times(10), "1p3d": times(14)[::-1], "2p2d": [9, None]})
    text = page([found], none, [], "", sweep=sweep_of(runs))
    section = text.partition('class="topologies"')[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>(.+?)</td><td>(.+?)</td>", section) == [
        ("1p3d", "14.0"), ("4a", "10.0"), ("2p2d", "-"),
    ]  # fmt: skip
    assert "no rate that was tried held the SLO in 1 of 2 rounds" in text
    assert "The highest rate that holds ttft=1s" in text


def test_other_runs_have_no_sweep_verdict(tmp_path: Path) -> None:
    assert sweep_of([tmp_path / "one", tmp_path / "two"]) is None
    runs = folders(tmp_path, {"4a": times(10), "1p3d": times(9)})
    assert sweep_of([*runs, tmp_path / "other" / "one"]) is None
