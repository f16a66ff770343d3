"""The report of a sweep's folder has the sweep's own verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.benchmark.report.chart_data import named
from deploy.benchmark.report.page import page
from deploy.benchmark.report.verdict import ReportVerdict, of_sweep
from deploy.benchmark.sweep import judge, write_sweep
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_sweep import sweep, times


def folders(place: Path, rates: dict[str, Sequence[float | None]]) -> list[Path]:
    one = sweep(rates)
    write_sweep(place, one.model_copy(update={"verdict": judge(one)}))
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
    found = of_sweep(folders(tmp_path, {"4a": times(10), "1p3d": split}))
    assert found is not None
    assert found.kind == kind


def test_the_page_has_every_topology_the_best_first_and_why_one_has_no_rate(tmp_path: Path) -> None:
    (found,) = named([(result(), [])])
    none = ReportVerdict("one run", "One.")
    assert "<h2>Topologies" not in page([found], none, [], "")
    runs = folders(tmp_path, {"4a": times(10), "1p3d": times(14)[::-1], "2p2d": [9, None]})
    text = page([found], of_sweep(runs) or none, [], "")
    section = text.partition('class="topologies"')[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>(.+?)</td><td>(.+?)</td>", section) == [
        ("1p3d", "14.0"), ("4a", "10.0"), ("2p2d", "-"),
    ]  # fmt: skip
    assert "no rate that was tried held the SLO in 1 of 2 rounds" in text
    assert "The highest rate that holds ttft=1s" in text


def test_other_runs_have_no_sweep_verdict(tmp_path: Path) -> None:
    assert of_sweep([tmp_path / "one", tmp_path / "two"]) is None
    runs = folders(tmp_path, {"4a": times(10), "1p3d": times(9)})
    assert of_sweep([*runs, tmp_path / "other" / "one"]) is None
