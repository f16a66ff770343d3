"""The report's section on the topologies of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.benchmark.report.cells import number, table
from deploy.benchmark.sweep import Sweep, TopologyRow, rows


def topologies_section(sweep: Sweep) -> Iterator[str]:
    """Yield the rate of each topology, the best first; where there is none, why."""
    what = f"The highest rate that holds {sweep.slo}" if sweep.slo else "The throughput"
    yield "<h2>Topologies</h2>"
    yield (
        f'<p class="soft">{what}, in requests per second: the median of the rounds, in each of '
        "which the topology was started anew, with its 95 % interval.</p>"
    )
    header = ("topology", "rate", f"each {sweep.unit}", "95 %", f"{sweep.unit}s", "rounds", "")
    yield table(header, map(_row, rows(sweep)), "topologies")


def _row(row: TopologyRow) -> Sequence[str]:
    known = row.low is not None and row.high is not None
    return (
        row.topology,
        number(row.rate),
        number(row.per_unit),
        f"{number(row.low)} to {number(row.high)}" if known else "-",
        str(row.units),
        str(row.rounds),
        row.why_not,
    )
