"""A comparison of two runs as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.benchmark.compare import Comparison, MetricRow, Unit
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import Estimate
from deploy.output.table import table

_SCALE: dict[Unit, tuple[float, str]] = {"ms": (1e3, " ms"), "1/s": (1, "/s"), "%": (100, " %")}


def compare_view(comparison: Comparison, first: Result, second: Result) -> str:
    """Return a table for each load, and below them what to know about them."""
    lines = [f"A  {_run(first)}", f"B  {_run(second)}"]
    lines += [f"differs: {one.field}: {one.first} and {one.second}" for one in comparison.unlike]
    header = ("metric", "A", "B", "B / A", "95 % interval", "B is")
    for load, rows in comparison.points.items():
        shown = [tuple(_cells(row)) for row in rows]
        lines += ["", f"At {load}, medians of the repeats ({_repeats(rows[0])}):", ""]
        lines.append(table(header, shown, right=header[1:5]))
    return "\n".join([*lines, "", *comparison.notes])


def interval(estimate: Estimate | None) -> str:
    """Return the ends of a ratio's interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.low:.2f} to {estimate.high:.2f}"


def _run(result: Result) -> str:
    return f"{result.stack.topology}, {result.model.name}, {result.workload.name}, {result.started}"


def _repeats(row: MetricRow) -> str:
    first, second = row.first.repeats, row.second.repeats
    return str(first) if first == second else f"{first} and {second}"


def _cells(row: MetricRow) -> Iterator[str]:
    factor, unit = _SCALE[row.metric.unit]
    yield row.metric.name
    for side in (row.first, row.second):
        yield f"{factor * side.value:.4g}{unit}"
    yield f"{row.ratio.value:.2f}" if row.ratio else "-"
    yield interval(row.ratio)
    yield row.verdict
