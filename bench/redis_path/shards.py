"""The kit's Redis path with one Redis, with several, and with Redis's own io-threads.

Each variant has servers of its own and as many engines as asked for; all take turns. What is told
is speed and processor seconds a GB of the engines and of Redis, and the median of the rounds'
ratios to one Redis.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.kit import say
from bench.redis_path import page, rounds
from bench.redis_path.contender import MIB
from bench.redis_path.report import markdown
from bench.redis_path.server import Server, redis_server

ENGINES = (1, 2)
VALUES_MIB = (4, 16)
_REDIS_MIB = 2048
_IO = ("--io-threads", "4")
# Name → how many Redis, and their further options. The first is what all are compared with.
VARIANTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "1 shard": (1, ()),
    "2 shards": (2, ()),
    "4 shards": (4, ()),
    "8 shards": (8, ()),
    "1 shard, 4 io-threads": (1, _IO),
}
ONE = "1 shard"


@dataclass(frozen=True)
class Group:
    """Redis servers that share the keys, seen as one."""

    servers: Sequence[Server]

    @property
    def port(self) -> int:
        return self.servers[0].port

    @property
    def socket(self) -> str:
        return os.pathsep.join(server.socket for server in self.servers)

    def cpu_s(self) -> float:
        return sum(server.cpu_s() for server in self.servers)

    def flush(self) -> None:
        for server in self.servers:
            server.flush()


@dataclass(frozen=True)
class Row:
    """One variant at one operation; medians over the rounds.

    Attributes:
        speed_over, cpu_over: the rounds' ratios to one shard, of GB/s and of all processor seconds.
        lowest, highest: of the latter.
    """

    engines: int
    value_mib: int
    operation: str
    variant: str
    gb_per_s: float
    speed_over: float
    engine_s_per_gb: float
    redis_s_per_gb: float
    cpu_over: float
    lowest: float
    highest: float


def run(count: int, *, as_json: bool, results: Path | None) -> None:
    """Measure, and print what was found."""
    found: list[Row] = []
    with _servers() as groups:
        version = groups[ONE].servers[0].version()
        for engines in ENGINES:
            with _sides(groups, engines) as sides:
                for mib in VALUES_MIB:
                    everything = Group([s for group in groups.values() for s in group.servers])
                    measured = rounds.transfers(sides, mib * MIB, count, everything)
                    found += _rows(measured, engines, mib)
    if results:
        results.write_text(_page(found, count, version), encoding="utf-8")
    print(json.dumps([asdict(row) for row in found]) if as_json else _tables(found))


@contextlib.contextmanager
def _servers() -> Iterator[Mapping[str, Group]]:
    with contextlib.ExitStack() as started:
        yield {
            name: Group(
                [started.enter_context(redis_server(_REDIS_MIB, *options)) for _ in range(count)]
            )
            for name, (count, options) in VARIANTS.items()
        }


@contextlib.contextmanager
def _sides(groups: Mapping[str, Group], engines: int) -> Iterator[list[rounds.Side]]:
    say(f"starting {len(groups)} variants of {engines} engines each")
    sides = [rounds.Side("ours", engines, group, None, name) for name, group in groups.items()]
    try:
        yield sides
    finally:
        for side in sides:
            side.close()


def _rows(measured: rounds.Measured, engines: int, mib: int) -> list[Row]:
    gigabytes = engines * rounds.values_of_a_prompt(mib * MIB) * mib * MIB / 1e9
    found = []
    for operation, of_variant in measured.items():
        for name, samples in of_variant.items():
            pairs = list(zip(samples, of_variant[ONE], strict=True))
            cpu = [_cpu_s(it) / _cpu_s(one) for it, one in pairs]
            found.append(
                Row(
                    engines, mib, operation, name,
                    gigabytes / statistics.median(sample.seconds for sample in samples),
                    statistics.median(one.seconds / it.seconds for it, one in pairs),
                    statistics.median(sample.cpu_s for sample in samples) / gigabytes,
                    statistics.median(sample.server_cpu_s for sample in samples) / gigabytes,
                    statistics.median(cpu), min(cpu), max(cpu),
                )
            )  # fmt: skip
    return found


def _cpu_s(sample: rounds.Sample) -> float:
    return sample.cpu_s + sample.server_cpu_s


def _tables(found: Sequence[Row]) -> str:
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in found:
        groups.setdefault((row.operation, row.engines, row.value_mib), []).append(row)
    return "\n\n".join(_table(*key, group) for key, group in groups.items())


def _table(operation: str, engines: int, mib: int, group: Sequence[Row]) -> str:
    who = "1 engine" if engines == 1 else f"{engines} engines at once"
    head = (
        "variant", "GB/s", "by 1 shard", "engines s/GB", "Redis s/GB", "all CPU by 1 shard",
        "lowest to highest",
    )  # fmt: skip
    lines = [
        (
            row.variant, f"{row.gb_per_s:.2f}", f"{row.speed_over:.2f}",
            f"{row.engine_s_per_gb:.2f}", f"{row.redis_s_per_gb:.2f}", f"{row.cpu_over:.2f}",
            f"{row.lowest:.2f} to {row.highest:.2f}",
        )
        for row in group
    ]  # fmt: skip
    return f"**{operation}**, {who}, values of {mib} MiB\n\n{markdown(head, lines)}"


_PAGE = """# Several Redis servers, and Redis's io-threads, measured

`python -m bench.redis_path --shards --results FILE` wrote this page on {date}.

{machine}

The kit's Redis path between staging memory and Redis, through Unix sockets, as in engines but
without vLLM. Every variant has its own servers; variants take turns in each round, and each
engine stores a prompt of 172 MiB and retrieves it. Numbers are medians of {count} rounds, ratios
the medians of the rounds' ratios to one shard. Seconds are user and system time.

{verdict}

{tables}
"""


def _page(found: Sequence[Row], count: int, version: str) -> str:
    return _PAGE.format(
        date=page.today(),
        machine=page.machine(version),
        count=count,
        verdict=_verdict(found),
        tables=_tables(found),
    )


def _verdict(found: Sequence[Row]) -> str:
    cpus = os.cpu_count() or 1
    most = max(ENGINES)
    lines = [
        f"- {row.operation}, {row.engines} engines, {row.value_mib} MiB, {row.variant}: "
        f"{row.speed_over:.2f} times the speed of one shard, at {row.cpu_over:.2f} times the "
        "processor seconds"
        for variant in ("2 shards", "1 shard, 2 io-threads")
        for row in found
        if (row.engines, row.variant) == (most, variant)
    ]
    return "\n".join([f"With {cpus} cores:", "", *lines])
