"""A sweep as people read it: what it will run, and what it found."""

from __future__ import annotations

from pathlib import Path

from deploy.benchmark.sweep import Sweep, TopologyRow, rows
from deploy.output.table import duration, table


def dry_run_view(sweep: Sweep, left_s: float) -> str:
    """Return the runs that are left and the time they will take."""
    runs = [(f"{number + 1} of {sweep.rounds}", name) for name, number in sweep.left]
    lines = [table(("round", "topology"), runs), ""]
    lines += [f"left out: {name}: {why}" for name, why in sweep.refused.items()]
    lines.append(f"{len(runs)} runs, about {duration(left_s)}; nothing was started")
    return "\n".join(lines)


def sweep_view(sweep: Sweep, folder: Path, best: Path | None, page: str | None) -> str:
    """Return the topologies, the best first, and the verdict."""
    header = ("topology", f"{sweep.unit}s", "rounds", "requests/s", f"per {sweep.unit}", "95 %")
    found = rows(sweep)
    lines = [
        table(header, [_cells(row) for row in found], right=header[1:]),
        *(f"{row.topology}: {row.why_not}" for row in found if row.why_not),
        "",
    ]
    if sweep.verdict:
        lines.append(sweep.verdict.sentence)
    lines.append(f"Results: {folder}")
    if page:
        lines.append(f"Report: {page}")
    if best:
        lines.append(f"Start it: deploy up -f {best}")
    return "\n".join(lines)


def _cells(row: TopologyRow) -> tuple[object, ...]:
    interval = "-" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
    return (
        row.topology,
        row.units,
        row.rounds,
        "-" if row.rate is None else f"{row.rate:.2f}",
        "-" if row.per_unit is None else f"{row.per_unit:.2f}",
        interval,
    )
