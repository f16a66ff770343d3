"""What the review's fixes cost: the Redis path and the router of an older commit and of this tree.

    .venv/bin/python -m bench.before_after [--only lookups|redis-path|router] [--rounds 60]
        [--redis-path COMMIT] [--router COMMIT] [--requests 640] [--spin-us 0]

Both sides have processes of their own and take turns in every round, so that a noisy machine hurts
both alike. Prints a table: the median of the rounds' ratios, after by before, the limits between
which it lies with 95 % certainty, and whether it is at most 1.03: "yes", "NO", or "not shown" where
1.03 is between the limits.

Redis path: the engine's processor seconds in a round, of which the first warms up.

Router: each round starts both routers anew, since two processes of the same code differ, too (where
their memory lies, the seeds of their hashes). They run on one core, in front of the same stand-in
for engines on the other one, and are asked in turns: one request each, or 64 at once. A round's
number is all processor time of the router's process ("processor"), or the median over the turns of
the time until the client has its answers ("wait", which client and engine are a part of). The same
code on both sides (`--router HEAD`) must give 1, and one with `--spin-us`, which has the router of
this tree waste that much in each request, as much more.

Run it in the checkout's folder, where its history is; it needs redis-server on PATH and the ports
29,010 to 29,202.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.kit import ROOT, median_within, say
from bench.redis_path.contender import MIB
from bench.redis_path.report import markdown
from bench.redis_path.rounds import Side, lookups, taking_part, transfers
from bench.redis_path.server import redis_server
from bench.router.__main__ import CONSUMER, OTHER, OURS, PRODUCER, ours, running
from bench.router.turns import in_turns

# The last commits before the review's fixes, and before engines had keys.
REDIS_PATH, ROUTER = "3ccb5bd^", "68b9ca7^"
MOST = 1.03
FEWEST = 20  # rounds, for the limits to hold
AFTER, BEFORE = "after", "before"
_VALUES_MIB = (1, 16)
_CLIENTS = (1, 64)
_MORE = 4  # times as many requests of many clients, for they are answered sooner
_WARM_UP = 64  # requests, for each router of a round
_REDIS_MIB = 2048

# what → side → seconds of each round
Spent = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure what was asked for, and print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", choices=("lookups", "redis-path", "router"))
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument(
        "--requests", type=int, default=640, help="to the router, a round and kind"
    )
    options.add_argument("--redis-path", default=REDIS_PATH, metavar="COMMIT")
    options.add_argument("--router", default=ROUTER, metavar="COMMIT")
    options.add_argument("--spin-us", type=float, default=0, help="what the router wastes")
    given = options.parse_args()
    spent: Spent = {}
    if given.only != "router":
        sizes = () if given.only == "lookups" else _VALUES_MIB
        with tree(given.redis_path) as before:
            spent |= redis_path(before, given.rounds, sizes)
    if given.only in (None, "router"):
        with tree(given.router) as before:
            spent |= router(before, given.rounds, given.requests, given.spin_us)
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


def router(before: Path, rounds: int, requests: int, spin_us: float) -> Spent:
    """Measure the routers of two trees, with a key for engines where they know it, as stacks do."""
    spent: Spent = {}
    others, theirs = _cores()
    engines = (sys.executable, "-m", "bench.router.stand_in", str(PRODUCER), str(CONSUMER))
    os.sched_setaffinity(0, {others})
    with tempfile.TemporaryDirectory() as folder, running(engines, CONSUMER, "/health"):
        key = Path(folder, "key")
        key.write_text("of this benchmark", encoding="ascii")
        started = [
            (AFTER, OURS, ROOT, _argv(OURS, ROOT, key, spin_us)),
            (BEFORE, OTHER, before, _argv(OTHER, before, key)),
        ]
        for number in range(rounds):
            with contextlib.ExitStack() as ends:
                sides = {}
                for side, port, kit, argv in started[:: 1 if number % 2 else -1]:
                    process = running(argv, port, "/readiness", kit, core=theirs)
                    sides[side] = port, ends.enter_context(process).pid
                _one_round(sides, requests, spent)
            say(f"router: round {number + 1} of {rounds}")
    for name, rows in spent.items():
        say(f"{name}: {1e6 * statistics.median(rows[BEFORE]):.0f} us before")
    return spent


def _cores() -> tuple[int, int]:
    """Return one for clients and engines, and one for the routers, as far as there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


def _argv(port: int, kit: Path, key: Path, spin_us: float = 0) -> tuple[str, ...]:
    argv = ours(port)
    if "--engine-key-file" in (kit / "deploy/router/pdkit_router/__main__.py").read_text("utf-8"):
        argv += ("--engine-key-file", str(key))
    if spin_us:
        argv = (argv[0], "-m", "bench.router.slower", str(spin_us), *argv[3:])
    return argv


def _one_round(sides: Mapping[str, tuple[int, int]], requests: int, spent: Spent) -> None:
    in_turns(sides, 1, _WARM_UP, stream=True)
    for clients, stream in itertools.product(_CLIENTS, (False, True)):
        kind = "streams of 32 events" if stream else "whole answers"
        name = f"router, {clients} client{'s' * (clients > 1)}, {kind}"
        turns = requests * min(clients, _MORE) // clients
        for side, of in in_turns(sides, clients, turns, stream=stream).items():
            seconds = {"processor": of.spent_s / turns, "wait": statistics.median(of.took_s)}
            for what, each_s in seconds.items():
                rows = spent.setdefault(f"{name}, {what}", {AFTER: [], BEFORE: []})
                rows[side].append(each_s / clients)


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
