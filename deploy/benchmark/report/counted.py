"""What a repeat has beside latencies and throughput: the rows of report.csv that it adds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from deploy.benchmark.facts import StackFacts
from deploy.benchmark.own_cost import cpu_s_gb
from deploy.benchmark.report.chart_data import Point
from deploy.benchmark.results import HitTokens, RedisPathUse, Repeat, Usage, hit_rate
from deploy.benchmark.statistics import Estimate, median_of


class CsvValue(NamedTuple):
    """A number with its name and its unit."""

    name: str
    unit: str
    value: float


class CsvMedian(NamedTuple):
    """The median of a number over what is independent."""

    name: str
    unit: str
    median: Estimate


def medians(point: Point) -> Iterator[CsvMedian]:
    """Yield all numbers of a point, in the order in which its repeats have them."""
    stack = point.run.result.stack
    found: dict[tuple[str, str], list[float]] = {}
    for sample in point.samples:
        for key, values in _together(sample, stack).items():
            found.setdefault(key, []).append(median(values))
    for (name, unit), values in found.items():
        yield CsvMedian(name, unit, median_of(values, most=1 if unit == "share" else math.inf))


def _together(sample: Sequence[Repeat], stack: StackFacts) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for repeat in sample:
        for name, unit, value in _counted(repeat, stack):
            found.setdefault((name, unit), []).append(value)
    return found


def _counted(repeat: Repeat, stack: StackFacts) -> Iterator[CsvValue]:
    for name, value in (
        ("requests", repeat.requests_per_s),
        ("input tokens", repeat.input_tokens_per_s),
        ("output tokens", repeat.output_tokens_per_s),
        ("goodput", repeat.goodput_per_s),
    ):
        if value is not None:
            yield CsvValue(f"{name} of each {stack.unit}", "1/s", value / stack.units)
    for role, stages in repeat.stages.items():
        for stage, seconds in stages.items():
            yield CsvValue(f"{role} {stage}", "s", seconds)
    for role, share in repeat.connector.items():
        yield CsvValue(f"connector in {role} steps", "share", share)
    if repeat.hits:
        yield from _hits(repeat.hits)
    if repeat.redis_path:
        yield from _redis_path(repeat.redis_path, repeat.completed)
    if repeat.usage:
        yield from _usage(repeat.usage, repeat.duration_s)


def _hits(hits: HitTokens) -> Iterator[CsvValue]:
    tokens = {
        "loaded from Redis": hits.external,
        "in own cache": hits.local,
        "computed": hits.computed,
    }
    if every := sum(tokens.values()):
        for name, count in tokens.items():
            yield CsvValue(f"prompt tokens {name}", "share", count / every)
    for name, rate in (
        ("external hit rate", hit_rate([hits], "queried")),
        ("eligible hit rate", hit_rate([hits], "eligible")),
    ):
        if rate is not None:
            yield CsvValue(name, "share", rate)


def _redis_path(path: RedisPathUse, answers: int) -> Iterator[CsvValue]:
    for name, size, speed, cpu_s in (
        ("stored", path.stored_bytes, path.store_gb_s, path.store_cpu_s),
        ("loaded", path.loaded_bytes, path.load_gb_s, path.load_cpu_s),
    ):
        yield CsvValue(f"KV {name}", "bytes", size)
        if size:
            yield CsvValue(f"speed of KV {name}", "GB/s", speed)
        if (each := cpu_s_gb([(cpu_s, size)])) is not None:
            yield CsvValue(f"CPU time of KV {name}", "s/GB", each)
    if path.lookups:
        yield CsvValue("a lookup", "s", path.lookup_ms / 1e3)
    if answers:
        yield CsvValue("store barrier of an answer", "s", path.barrier_wait_s / answers)


def _usage(usage: Usage, seconds: float) -> Iterator[CsvValue]:
    for name, cpu_s in usage.cpu_s.items():
        yield CsvValue(f"CPU of {name}", "cores", cpu_s / seconds)
    for name, size in usage.peak_rss_bytes.items():
        yield CsvValue(f"peak memory of {name}", "bytes", size)
    for index, use in (usage.gpu or {}).items():
        if use.utilization is not None:
            yield CsvValue(f"GPU {index} computes", "share", use.utilization)
        if use.peak_memory_bytes is not None:
            yield CsvValue(f"peak memory of GPU {index}", "bytes", use.peak_memory_bytes)
