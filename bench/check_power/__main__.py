"""Measure how surely the check notices wrong KV: `python -m bench.check_power`.

Brings up a stack with LMCache's own Redis client, which has no checksum. In each trial the check's
own code asks one pair, and one thing is damaged in Redis between prefill and decode; what is
damaged, and where, follows from the seed. Before any damage, whole checks of the stack must pass.
With `--tier`, the stack has LMCache's server, and its memory or Redis behind it is damaged.

Exits with 1 if a kind is noticed less often than 99 times of 100, or a sound stack fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.check_power import report
from bench.check_power.damage import KINDS
from bench.check_power.layout import WORDS
from bench.check_power.running import running_bench
from bench.check_power.trials import Outcome, Record, Series, planned, run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100, help="of each kind")
    parser.add_argument("--healthy", type=int, default=50, help="whole checks of a sound stack")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--layers", type=int, default=0,
        help="take a random model in the shape of Qwen2.5-0.5B, with so many layers; the page then "
        "has the tiny model's outcomes of the same record, too",
    )  # fmt: skip
    parser.add_argument(
        "--tier", choices=list(report.TIERS), default="", help="of LMCache's server"
    )
    parser.add_argument(
        "--dtype", choices=list(WORDS), default="bfloat16", help="of KV; CPUs without AVX-512 are "
        "slower at bfloat16",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", type=Path, help="write the page of results there")
    parser.add_argument("--record", type=Path, help="keep outcomes there, and go on from them")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds {unknown[0]}: there is no such kind; there are: {', '.join(KINDS)}")
    plan = list(planned(kinds, options.trials, options.healthy))
    with tempfile.TemporaryDirectory() as folder:
        record = Record(options.record or Path(folder) / "outcomes.jsonl")
        series = Series(options.seed, options.layers, options.tier, options.dtype)
        if any(not record.has(series, *one) for one in plan):
            with running_bench(series) as bench:
                run(bench, record, plan, series)
    outcomes = [o for o in record.outcomes if o.series == series and (o.kind, o.number) in plan]
    if options.results:
        page = report.page([o for o in record.outcomes if o.seed == series.seed], series.seed)
        options.results.write_text(page, encoding="utf-8")
    return _tell(outcomes, options)


def _tell(outcomes: list[Outcome], options: argparse.Namespace) -> int:
    rows = report.rows(outcomes)
    if options.json:
        print(json.dumps([row.as_dict() for row in rows]))
    else:
        print(report.table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
