"""What the review's fixes cost: the Redis path and the router of an older commit and of this tree.

    .venv/bin/python -m bench.before_after [--only lookups|redis-path|router] [--rounds 60]
        [--redis-path COMMIT] [--router COMMIT] [--requests 1000]

Both sides have processes of their own and take turns in every round, so that a noisy machine hurts
both alike; the first round warms up. Prints a table of processor seconds of engine or router: the
median of the rounds' ratios, after by before, the limits between which it lies with 95 % certainty,
and whether it is at most 1.03: "yes", "NO", or "not shown" where 1.03 is between the limits. Run it
in the checkout's folder, where its history is; it needs redis-server on PATH and the ports 29,010
to 29,202.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.kit import ROOT, median_within, say
from bench.redis_path.contenders import MIB
from bench.redis_path.report import markdown
from bench.redis_path.rounds import Side, lookups, taking_part, transfers
from bench.redis_path.server import redis_server
from bench.router.__main__ import CONSUMER, OTHER, OURS, PRODUCER, one_round, ours, running

# The last commits before the review's fixes, and before engines had keys.
REDIS_PATH, ROUTER = "3ccb5bd^", "68b9ca7^"
MOST = 1.03
FEWEST = 20  # rounds, for the limits to hold
AFTER, BEFORE = "after", "before"
_VALUES_MIB = (1, 16)
_CLIENTS = (1, 64)
_REDIS_MIB = 2048

# what → side → processor seconds of each round
Spent = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure what was asked for, and print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", choices=("lookups", "redis-path", "router"))
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--requests", type=int, default=1000, help="of the router in each round")
    options.add_argument("--redis-path", default=REDIS_PATH, metavar="COMMIT")
    options.add_argument("--router", default=ROUTER, metavar="COMMIT")
    given = options.parse_args()
    spent: Spent = {}
    if given.only != "router":
        sizes = () if given.only == "lookups" else _VALUES_MIB
        with tree(given.redis_path) as before:
            spent |= redis_path(before, given.rounds, sizes)
    if given.only in (None, "router"):
        with tree(given.router) as before:
            spent |= router(before, given.rounds, given.requests)
    print(table(spent))


@contextlib.contextmanager
def tree(commit: str) -> Iterator[Path]:
    """Yield a folder with the kit as it was at a commit."""
    argv = ("git", "archive", "--format=zip", commit, "deploy")
    packed = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as name:
        zipfile.ZipFile(io.BytesIO(packed)).extractall(name)
        yield Path(name)


def redis_path(before: Path, rounds: int, values_mib: Sequence[int]) -> Spent:
    """Measure the engine's side of the Redis path, of two trees: lookups, and values of sizes."""
    spent: Spent = {}
    with redis_server(_REDIS_MIB) as server:
        started = [
            Side("ours", 1, server, None, label=label, kit=kit)
            for label, kit in ((BEFORE, before), (AFTER, ROOT))
        ]
        with taking_part(started) as ready:
            if len(ready) < len(started):
                sys.exit("one side cannot take part; BENCH_STDERR=1 shows why")
            measured = {"Redis path": lookups(ready, rounds)}
            for mib in values_mib:
                measured[f"Redis path, {mib} MiB"] = transfers(ready, mib * MIB, rounds, server)
    for what, of in measured.items():
        for operation, sides in of.items():
            name = f"{what}, {operation}"
            spent[name] = {side: [one.cpu_s for one in each] for side, each in sides.items()}
    return spent


def router(before: Path, rounds: int, requests: int) -> Spent:
    """Measure the routers of two trees, the later one with a key for engines, as stacks have it."""
    spent: Spent = {}
    engines = (sys.executable, "-m", "bench.router.stand_in", str(PRODUCER), str(CONSUMER))
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text("of this benchmark", encoding="ascii")
        after = (*ours(OURS), "--engine-key-file", str(key))
        with (
            running(engines, CONSUMER, "/health"),
            running(after, OURS, "/readiness") as new,
            running(ours(OTHER), OTHER, "/readiness", before) as old,
        ):
            sides = {AFTER: (OURS, new), BEFORE: (OTHER, old)}
            for clients, stream in itertools.product(_CLIENTS, (False, True)):
                kind = "streams of 32 events" if stream else "whole answers"
                name = f"router, {clients} client{'s' * (clients > 1)}, {kind}"
                rows = spent[name] = {side: [] for side in sides}
                for turn in range(rounds + 1):
                    for side in list(sides)[:: 1 if turn % 2 else -1]:
                        port, process = sides[side]
                        took = one_round(port, process, clients, requests, stream=stream).cpu_us
                        if turn:  # the first one warms up
                            rows[side].append(took)
                say(name)
    return spent


def table(spent: Spent) -> str:
    """Return the ratios as Markdown, which reads as plain text."""
    lines = [_row(name, sides) for name, sides in spent.items()]
    head = ("what", "rounds", "after / before", "95 % limits", f"at most {MOST}")
    return markdown(head, lines)


def _row(name: str, sides: dict[str, list[float]]) -> Sequence[str]:
    ratios = [new / old for new, old in zip(sides[AFTER], sides[BEFORE], strict=True)]
    ratio, low, high = median_within(ratios)
    within = "yes" if high <= MOST else "NO" if low > MOST else "not shown"
    told = within if len(ratios) >= FEWEST else "too few rounds"
    return name, str(len(ratios)), f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", told


if __name__ == "__main__":
    main()
