"""Print the trials of a folder as a Markdown table: `python -m bench.faults.table FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.faults.history import OUTCOMES, RESULTS

COUNTS = ("requests", *OUTCOMES)
HEAD = ("fault", "trials", *COUNTS, "longest request", "all ready again after: median, longest")


def table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with the sums of each fault's trials."""
    by_fault: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_fault.setdefault(row["fault"], []).append(row)
    yield _line(HEAD)
    yield _line("---" for _ in HEAD)
    for fault, trials in by_fault.items():
        whole = [trial["whole after s"] for trial in trials]
        yield _line(
            (
                fault, len(trials), *(sum(trial[count] for trial in trials) for count in COUNTS),
                f"{max(trial['longest s'] for trial in trials)} s",
                f"{median(whole):.1f} s, {max(whole)} s",
            )
        )  # fmt: skip


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    lines = (Path(sys.argv[1]) / RESULTS).read_text(encoding="utf-8").splitlines()
    print("\n".join(table(map(json.loads, lines))))
