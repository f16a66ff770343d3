"""Print what sweeps found as Markdown, for docs/results/which-split-cpu.md.

`python -m bench.which_split SWEEP...`: folders of finished sweeps, a section for each.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.benchmark.results import Result, read_result
from deploy.benchmark.sweep import Sweep, TopologyRow, read_sweep, rows


def main() -> None:
    """Print a section for each folder that is named."""
    sys.stdout.write("\n".join(section(Path(folder)) for folder in sys.argv[1:]))


def section(folder: Path) -> str:
    """Return a sweep as Markdown."""
    sweep = read_sweep(folder)
    results = [read_result(folder / run.folder) for run in sweep.runs if run.folder]
    return "\n".join((*_facts(sweep, results), "", *_table(sweep), "", *_verdict(sweep), ""))


def _facts(sweep: Sweep, results: list[Result]) -> Iterator[str]:
    first = results[0]
    machine, versions, model = first.machine, first.versions, first.model
    load = max(result.machine.load_1m for result in results)
    minutes = sum(run.seconds for run in sweep.runs) / 60
    yield f"## {model.name}, {first.workload.name}"
    yield ""
    yield "```"
    yield shlex.join(sweep.command)
    yield "```"
    yield ""
    yield (
        f"{sweep.started[:10]}, {machine.cores} cores of {machine.processor}, "
        f"{machine.memory_gib:.0f} GiB; load average at most {load:.1f} when a run began; "
        f"vLLM {versions.vllm}, LMCache {_lmcache(results)}; {model.kv_bytes_a_token:,} bytes of "
        f"KV per token. {len(sweep.runs)} runs took {minutes:.0f} min."
    )


def _lmcache(results: list[Result]) -> str:
    """Return the version; plain engines have none."""
    return next((one.versions.lmcache for one in results if one.versions.lmcache), "none")


def _table(sweep: Sweep) -> Iterator[str]:
    yield f"| topology | requests/s | per {sweep.unit} | 95 % | rounds |"
    yield "|---|---|---|---|---|"
    yield from map(_row, rows(sweep))


def _row(row: TopologyRow) -> str:
    if row.rate is None or row.per_unit is None:
        return f"| `{row.topology}` | {row.why_not} | | | {row.rounds} |"
    interval = "" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
    return f"| `{row.topology}` | {row.rate:.2f} | {row.per_unit:.2f} | {interval} | {row.rounds} |"


def _verdict(sweep: Sweep) -> Iterator[str]:
    yield f"> {sweep.verdict.sentence if sweep.verdict else 'The sweep has not ended.'}"


if __name__ == "__main__":
    main()
