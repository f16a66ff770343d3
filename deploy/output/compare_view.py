"""A comparison of two runs as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.benchmark.compare import Comparison, Difference, MetricRow, Unit
from deploy.benchmark.compare_sweeps import ComparedTopology, SweepComparison
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import Estimate
from deploy.benchmark.sweep import Sweep
from deploy.output.table import table

_SCALE: dict[Unit, tuple[float, str]] = {"ms": (1e3, " ms"), "1/s": (1, "/s"), "%": (100, " %")}


def compare_view(comparison: Comparison, first: Result, second: Result) -> str:
    """Return a table for each load, and below them what to know about them."""
    lines = [f"A  {_run(first)}", f"B  {_run(second)}"]
    lines += _differing(comparison.unlike)
    header = ("metric", "A", "B", "B / A", "95 % interval", "B is")
    for load, rows in comparison.points.items():
        shown = [tuple(_cells(row)) for row in rows]
        lines += [
            "",
            f"At {load}, medians of the repeats ({_counted(rows[0].first, rows[0].second)}):",
            "",
        ]
        lines.append(table(header, shown, right=header[1:5]))
    return "\n".join([*lines, "", *comparison.notes])


def sweeps_view(comparison: SweepComparison, first: Sweep, second: Sweep) -> str:
    """Return a table of the topologies, below what each sweep said itself."""
    what = f"Highest rate that holds {first.slo}" if first.slo else "Throughput"
    header = ("topology", "A", "B", "B / A", "95 % interval", "rounds", "B is")
    found = [_topology(one) for one in comparison.topologies]
    return "\n".join(
        [
            f"A  {_sweep(first)}",
            f"B  {_sweep(second)}",
            *_differing(comparison.unlike),
            "",
            f"{what}, in requests/s, medians of the rounds:",
            "",
            table(header, found, right=header[1:6]),
            "",
            *comparison.notes,
        ]
    )


def _sweep(sweep: Sweep) -> str:
    sent = f"{sweep.workload.name}, " if sweep.workload else ""
    said = f": {sweep.verdict.sentence}" if sweep.verdict else ""
    return f"{sent}{sweep.started}{said}"


def _topology(one: ComparedTopology) -> tuple[str, ...]:
    rounds = _counted(one.first, one.second)
    return (
        one.topology, f"{one.first.value:.2f}", f"{one.second.value:.2f}",
        f"{one.ratio.value:.2f}", interval(one.ratio), rounds, one.verdict,
    )  # fmt: skip


def _differing(unlike: Sequence[Difference]) -> list[str]:
    return [f"differs: {one.field}: {one.first} and {one.second}" for one in unlike]


def interval(estimate: Estimate | None) -> str:
    """Return the ends of a ratio's interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.low:.2f} to {estimate.high:.2f}"


def _run(result: Result) -> str:
    return f"{result.stack.topology}, {result.model.name}, {result.workload.name}, {result.started}"


def _counted(first: Estimate, second: Estimate) -> str:
    same = first.repeats == second.repeats
    return str(first.repeats) if same else f"{first.repeats} and {second.repeats}"


def _cells(row: MetricRow) -> Iterator[str]:
    factor, unit = _SCALE[row.metric.unit]
    yield row.metric.name
    for side in (row.first, row.second):
        yield f"{factor * side.value:.4g}{unit}"
    yield f"{row.ratio.value:.2f}" if row.ratio else "-"
    yield interval(row.ratio)
    yield row.verdict
