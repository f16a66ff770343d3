"""What was measured, as rows, as plain text and as a page for docs/results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.redis_path.contender import MIB
from bench.redis_path.rounds import Measured, Sample, values_of_a_prompt

LABELS = {
    "raw": "raw socket",
    "rawunix": "raw Unix socket",
    "redis": "stock redis://",
    "hiredis": "stock redis:// + hiredis",
    "resp": "stock resp://",
    "ours": "ours",
    "oursport": "ours, by TCP",
    "signed": "ours, MAC",
    "unchecked": "ours, no checksum",
    "second": "ours, second tier",
    "copy": "a copy in memory",
    "first": "first tier",
}


# Of these lookups are compared where nothing else is measured.
OWN = ("raw", "rawunix", "ours", "oursport")


@dataclass(frozen=True)
class Row:
    """One contender at one operation; medians over the rounds.

    Attributes:
        ours_over: median of the rounds' ratios of speed, ours by this one's.
        lowest, highest: of these ratios.
        tcp_over: the same of ours by TCP; None if that took no part.
        second_over, first_over: the same of the tiers of LMCache's server.
        cpu_s_per_gb, redis_s_per_gb: processor seconds of the engines, and of Redis.
        cpu_over: median of the rounds' ratios of the engines' processor time, ours by this one's.
        all_cpu_ms, all_cpu_over: the same of engines and Redis together.
    """

    engines: int
    value_mib: int
    operation: str
    contender: str
    rounds: int
    ms: float
    gb_per_s: float | None
    ours_over: float
    lowest: float
    highest: float
    tcp_over: float | None
    second_over: float | None
    first_over: float | None
    cpu_s_per_gb: float | None
    redis_s_per_gb: float | None
    cpu_over: float | None
    all_cpu_ms: float
    all_cpu_over: float


def rows(measured: Measured, engines: int, value_bytes: int) -> list[Row]:
    """Return the rows of what `transfers` or, with no bytes, `lookups` measured."""
    return [
        _row((engines, value_bytes, operation, name), samples, of_side)
        for operation, of_side in measured.items()
        for name, samples in of_side.items()
    ]


def _row(
    what: tuple[int, int, str, str],
    samples: Sequence[Sample],
    of_side: Mapping[str, Sequence[Sample]],
) -> Row:
    engines, value_bytes, operation, name = what
    pairs = list(zip(samples, of_side["ours"], strict=True))
    ratios = _ratios(samples, of_side["ours"])
    others = (_ratio(samples, of_side.get(one)) for one in ("oursport", "second", "first"))
    seconds = statistics.median(sample.seconds for sample in samples)
    cpu = cpu_over = redis = speed = None
    if value_bytes:
        gigabytes = engines * values_of_a_prompt(value_bytes) * value_bytes / 1e9
        speed = gigabytes / seconds
        cpu = statistics.median(sample.cpu_s for sample in samples) / gigabytes
        redis = statistics.median(sample.server_cpu_s for sample in samples) / gigabytes
        cpu_over = statistics.median(our.cpu_s / its.cpu_s for its, our in pairs)
    return Row(
        engines, value_bytes // MIB, operation, name, len(samples), 1000 * seconds, speed,
        statistics.median(ratios), min(ratios), max(ratios),
        *others, cpu, redis, cpu_over,
        1000 * statistics.median(_all_cpu_s(sample) for sample in samples),
        statistics.median(_all_cpu_s(our) / _all_cpu_s(its) for its, our in pairs),
    )  # fmt: skip


def _all_cpu_s(sample: Sample) -> float:
    return sample.cpu_s + sample.server_cpu_s


def _ratios(its: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    return [it.seconds / our.seconds for it, our in zip(its, ours, strict=True)]


def _ratio(its: Sequence[Sample], others: Sequence[Sample] | None) -> float | None:
    return statistics.median(_ratios(its, others)) if others else None


def tables(found: Sequence[Row]) -> str:
    """Return the rows as Markdown, which reads as plain text too."""
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.engines, row.value_mib, row.operation), []).append(row)
    transfers = {key: group for key, group in groups.items() if key[1]}
    lookups = [row for key, group in groups.items() if not key[1] for row in group]
    parts = [_transfer_table(*key, group) for key, group in transfers.items()]
    return "\n\n".join([*parts, _lookup_table(lookups)] if lookups else parts)


def _transfer_table(engines: int, value_mib: int, operation: str, group: Sequence[Row]) -> str:
    count = values_of_a_prompt(value_mib * MIB)
    who = "1 engine" if engines == 1 else f"{engines} engines at once"
    title = f"**{operation}**, {who}, {count} values of {value_mib} MiB each"
    head = (
        "contender", "GB/s", "ours / it", "lowest to highest", "CPU s/GB", "ours / it (CPU)",
        "Redis s/GB",
    )  # fmt: skip
    lines = [
        (
            LABELS[row.contender], f"{row.gb_per_s:.2f}", f"{row.ours_over:.2f}",
            f"{row.lowest:.2f} to {row.highest:.2f}", f"{row.cpu_s_per_gb:.2f}",
            f"{row.cpu_over:.2f}", f"{row.redis_s_per_gb:.2f}",
        )
        for row in group
    ]  # fmt: skip
    return f"{title}\n\n{markdown(head, lines)}"


def _lookup_table(group: Sequence[Row]) -> str:
    head = ("lookup", "contender", "ms", "it / ours", "CPU ms, Redis too", "ours / it (CPU)")
    lines = [
        (
            row.operation, LABELS[row.contender], f"{row.ms:.2f}", f"{row.ours_over:.2f}",
            f"{row.all_cpu_ms:.2f}", f"{row.all_cpu_over:.2f}",
        )
        for row in group
    ]  # fmt: skip
    return f"**lookup** of chunks that are all there, 1 engine\n\n{markdown(head, lines)}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, which reads as plain text, too."""
    widths = [max(len(line[at]) for line in [head, *lines]) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(head), rule, *map(line, lines)])


# Of what, by which operation, over which contender, which of ours, at least.
_SPEEDS = (
    ("retrieve by raw GET, TCP", "retrieve", "raw", "tcp_over", 0.85),
    ("retrieve by raw GET, Unix", "retrieve", "rawunix", "ours_over", 0.85),
    ("second tier's retrieve by raw GET, Unix", "retrieve", "rawunix", "second_over", 0.85),
    ("retrieve by stock redis://", "retrieve", "redis", "ours_over", 2.5),
    ("retrieve by stock redis://, TCP", "retrieve", "redis", "tcp_over", 2.5),
    ("first tier's retrieve by a copy in memory", "retrieve", "copy", "first_over", 0.5),
    ("store by raw SET, TCP", "store", "raw", "tcp_over", 0.85),
    ("store by raw SET, Unix", "store", "rawunix", "ours_over", 0.85),
    ("second tier's store by raw SET, Unix", "store", "rawunix", "second_over", 0.85),
)


@dataclass(frozen=True)
class Target:
    """A must-hold and what was measured of it."""

    what: str
    wanted: str
    measured: str
    met: bool


def targets(found: Sequence[Row]) -> list[Target]:
    """Return the must-holds that the rows of one engine can tell, at the worst value size."""
    alone = [row for row in found if row.engines == 1]
    judged = []
    for what, operation, contender, which, least in _SPEEDS:
        of = [r for r in alone if r.operation == operation and r.contender == contender]
        for row in of:
            ratio: float | None = getattr(row, which)
            if ratio is not None:
                name = f"{what}, {row.value_mib} MiB"
                judged.append(Target(name, f">= {least:.2f}", f"{ratio:.2f}", ratio >= least))
    for row in alone:
        if row.contender == "redis" and row.cpu_over is not None:
            judged.append(
                Target(
                    f"CPU of {row.operation} by stock redis://, {row.value_mib} MiB", "<= 0.50",
                    f"{row.cpu_over:.2f}", row.cpu_over <= 0.5,
                )
            )  # fmt: skip
        if row.contender == "ours" and row.operation == "lookup of 1000":
            judged.append(Target("lookup of 1,000", "< 5 ms", f"{row.ms:.2f} ms", row.ms < 5))
        if row.contender == "rawunix" and row.operation == "lookup of 1000":
            ratios = {"time": 1 / row.ours_over, "CPU": row.all_cpu_over}
            judged += [
                Target(f"{of} of lookup of 1,000 by raw socket, Unix", "<= 2.00",
                       f"{ratio:.2f}", ratio <= 2)
                for of, ratio in ratios.items()
            ]  # fmt: skip
    return judged


def target_table(judged: Sequence[Target]) -> str:
    """Return the must-holds as Markdown."""
    lines = [(t.what, t.wanted, t.measured, "yes" if t.met else "NO") for t in judged]
    return markdown(("must hold", "wanted", "measured", "met"), lines)
