"""How fast KV moves to and from Redis: a plain socket, stock LMCache in three ways, and the kit's.

    .venv/bin/python -m bench.redis_path [--quick] [--json] [--results FILE]
    .venv/bin/python -m bench.redis_path --lookups [--json]    lookups only
    .venv/bin/python -m bench.redis_path --stack [--json]      in a real stack
    .venv/bin/python -m bench.redis_path --clients [--json]    stock and ours in real engines
    .venv/bin/python -m bench.redis_path --connectors [--json] lmcache and lmcache-mp in real stacks
    .venv/bin/python -m bench.redis_path --shards [--json]     several Redis, and io-threads
    .venv/bin/python -m bench.redis_path --long [--json]       a prompt larger than staging memory

Run it in the checkout's folder; it needs redis-server on PATH. Every contender has a process of its
own; they take turns at every round, so that a noisy machine hurts all alike, and what is told of
two of them is the median of the rounds' ratios. Values lie in LMCache's own staging memory; a
prompt is 172 MiB of them. A contender that cannot take part is named on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.kit import say
from bench.redis_path import page, report, rounds
from bench.redis_path.contender import MIB
from bench.redis_path.contenders import names
from bench.redis_path.hiredis_folder import hiredis_folder
from bench.redis_path.server import Server, redis_server

SIZES_MIB = (1, 4, 16, 32)
# More than one turn stores (four engines' prompts of 172 MiB), for Redis counts what it is sending,
# too, and would evict: stock clients ask for a whole prompt at once.
REDIS_MIB = 4096
MANY_ENGINES = 4
# They have no Redis to ask, nor keys in it.
_NO_LOOKUPS = ("copy", "first")


def main() -> None:
    options = _options()
    for name in ("stack", "clients", "connectors", "shards", "long"):
        if getattr(options, name):
            other = importlib.import_module(f"bench.redis_path.{name}")
            other.run(options.rounds, as_json=options.json, results=options.results)
            return
    with hiredis_folder() as hiredis, redis_server(REDIS_MIB) as server:
        version = server.version()
        found = _measure(options, server, hiredis)
    judged = report.targets(found)
    if options.results:
        write = page.lookups_page if options.lookups else page.page
        options.results.write_text(write(found, judged, version), encoding="utf-8")
    if options.json:
        print(
            json.dumps({"rows": [asdict(r) for r in found], "targets": [asdict(t) for t in judged]})
        )
        return
    print(f"{report.tables(found)}\n\n{report.target_table(judged)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.redis_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="16 MiB, one engine, 3 rounds")
    parser.add_argument("--lookups", action="store_true", help="lookups only, of raw and ours")
    parser.add_argument("--stack", action="store_true", help="measure a real stack instead")
    parser.add_argument("--clients", action="store_true", help="stock and ours in real engines")
    parser.add_argument("--connectors", action="store_true", help="both connectors, side by side")
    parser.add_argument("--shards", action="store_true", help="several Redis, and io-threads")
    parser.add_argument("--long", action="store_true", help="a prompt of 2 GiB, in a real stack")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a page, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(3, options.rounds)
    return options


def _measure(options: argparse.Namespace, server: Server, hiredis: Path | None) -> list[report.Row]:
    found: list[report.Row] = []
    wanted = [name for name in names() if name != "hiredis" or hiredis]
    if options.lookups:
        wanted = [name for name in wanted if name in report.OWN]
    with _sides(wanted, 1, server, hiredis) as ready:
        asking = [side for side in ready if side.name not in _NO_LOOKUPS]
        found += report.rows(rounds.lookups(asking, options.rounds), 1, 0)
        if options.lookups:
            return found
        server.flush()
        for mib in (16,) if options.quick else SIZES_MIB:
            measured = rounds.transfers(ready, mib * MIB, options.rounds, server)
            found += report.rows(measured, 1, mib * MIB)
    if not options.quick:
        several = [name for name in wanted if name not in ("signed", "unchecked", *_NO_LOOKUPS)]
        with _sides(several, MANY_ENGINES, server, hiredis) as ready:
            server.flush()
            measured = rounds.transfers(ready, 16 * MIB, options.rounds, server)
            found += report.rows(measured, MANY_ENGINES, 16 * MIB)
    return found


@contextlib.contextmanager
def _sides(
    wanted: Sequence[str], engines: int, server: Server, hiredis: Path | None
) -> Iterator[list[rounds.Side]]:
    say(f"starting {len(wanted)} contenders of {engines} engines each")
    with rounds.sides(wanted, engines, server, hiredis) as ready:
        yield ready


if __name__ == "__main__":
    main()
