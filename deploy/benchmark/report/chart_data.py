"""What charts and tables show: medians by run and load, distributions, and shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.benchmark.break_even import prefill_s
from deploy.benchmark.compare import METRICS, by_load, differences, median_metric, values_of
from deploy.benchmark.own_cost import measured_once
from deploy.benchmark.report.verdict import stack_names
from deploy.benchmark.results import Repeat, RequestRecord, Result
from deploy.benchmark.slo import RESOLUTION
from deploy.benchmark.statistics import Estimate, noise

# Steps of a distribution's curve: enough for the eye, and few enough for a page.
_QUANTILES = (*range(0, 98, 2), 98, 99, 99.5, 100)
# Times are kept in steps of 10 µs. A gap between tokens of one piece is 0, which has no
# place on a log scale.
_LEAST_MS = 0.01

Measured = tuple[Result, Sequence[RequestRecord]]
# The stages as a request passes them, with the colour's order in the chart.
_STAGES = {
    ("producer", "queue"): "queue before prefill",
    ("aggregated", "queue"): "queue before prefill",
    ("producer", "lookup"): "lookup",
    ("aggregated", "lookup"): "lookup",
    ("producer", "prefill"): "prefill",
    ("aggregated", "prefill"): "prefill",
    ("producer", "store"): "KV store",
    ("consumer", "queue"): "queue before decode",
    ("consumer", "lookup"): "lookup",
    ("consumer", "load"): "KV load",
    ("producer", "load"): "KV load",
    ("aggregated", "load"): "KV load",
    ("consumer", "load and prefill"): "KV load and first token",
    ("consumer", "prefill"): "first token after load",
    ("consumer", "decode"): "decode",
    ("aggregated", "decode"): "decode",
}
STAGE_ORDER = tuple(dict.fromkeys(_STAGES.values()))
SOURCES = {"external": "loaded from Redis", "local": "engine's cache", "computed": "computed"}


@dataclass(frozen=True)
class StackRuns:
    """All runs of a stack together, under one name.

    Attributes:
        result: the first run's, with the repeats of all, and the medians of what each run measured
            once.
        starts: of a sweep, the number of the start that each repeat is of.
    """

    name: str
    result: Result
    requests: Sequence[RequestRecord]
    starts: Sequence[int] | None = None


@dataclass(frozen=True)
class Point:
    """A run at one load."""

    run: StackRuns
    load: str
    repeats: Sequence[Repeat]

    @property
    def samples(self) -> list[list[Repeat]]:
        """The repeats by what is independent: each of them; in a sweep, those of each start."""
        starts = self.run.starts
        found: dict[int, list[Repeat]] = {}
        for one in self.repeats:
            found.setdefault(starts[one.index] if starts else one.index, []).append(one)
        return list(found.values())

    def median(self, metric: str) -> Estimate | None:
        """Return a metric of METRICS, by its name."""
        return median_metric(_METRICS[metric], self._values(metric))

    @property
    def noise(self) -> float | None:
        """Relative spread of the TTFT medians."""
        found = self._values("TTFT p50")
        return noise(found) if len(found) > 1 and min(found) > 0 else None

    def _values(self, metric: str) -> list[float]:
        """Return one value of each sample that has the metric: the median of its repeats."""
        found = (values_of(_METRICS[metric], sample) for sample in self.samples)
        return [median(values) for values in found if values]


_METRICS = {metric.name: metric for metric in METRICS}


def named(results: Sequence[Measured], *, of_sweep: bool = False) -> list[StackRuns]:
    """Return the stacks with names that tell them apart; like runs of a stack are one.

    Args:
        of_sweep: each run is of another start, so that its repeats are not independent.
    """
    groups: list[list[Measured]] = []
    for one in results:
        like = next((group for group in groups if _like(group[0][0], one[0])), None)
        if like is None:
            groups.append([one])
        else:
            like.append(one)
    merged = [_merged(group) for group in groups]
    names = stack_names([result for result, _ in merged])
    return [
        StackRuns(name, result, requests, _starts(group) if of_sweep else None)
        for name, group, (result, requests) in zip(names, groups, merged, strict=True)
    ]


def _like(first: Result, second: Result) -> bool:
    return first.stack == second.stack and not differences(first, second)


def _merged(group: Sequence[Measured]) -> Measured:
    """Return the runs as one; repeats are numbered on, and with them the requests.

    Each search tries rates of its own: those that differ by less than its resolution are one load.
    """
    repeats: list[Repeat] = []
    requests: list[RequestRecord] = []
    for result, records in group:
        number = {one.index: len(repeats) + at for at, one in enumerate(result.repeats)}
        repeats += [
            one.model_copy(update={"index": number[one.index], "rate": _level(result, one, group)})
            for one in result.repeats
        ]
        requests += [
            one.model_copy(update={"repeat": number[one.repeat]})
            for one in records
            if one.repeat in number
        ]
    interrupted = any(result.interrupted for result, _ in group)
    update = {
        "repeats": repeats,
        "interrupted": interrupted,
        **measured_once([result for result, _ in group]),
    }
    return group[0][0].model_copy(update=update), requests


def _starts(group: Sequence[Measured]) -> list[int]:
    """Return the number of the run that each repeat is of, in the order of `_merged`."""
    return [at for at, (result, _) in enumerate(group) for _ in result.repeats]


def _level(result: Result, repeat: Repeat, group: Sequence[Measured]) -> float | None:
    """Return the rate offered; of several searches, the closest step of their resolution."""
    if repeat.rate is None or result.rate_search is None or len(group) == 1:
        return repeat.rate
    return math.pow(RESOLUTION, round(math.log(repeat.rate, RESOLUTION)))


def points(runs: Iterable[StackRuns]) -> list[Point]:
    """Return each run at each of its loads, the lowest first."""
    return [
        point
        for run in runs
        for point in sorted(
            (Point(run, load, same) for load, same in by_load(run.result.repeats).items()),
            key=_offered,
        )
    ]


def curve(found: Iterable[Point], metric: str) -> Iterator[dict[str, Any]]:
    """Yield a metric against the requests answered per second, with intervals."""
    for order, point in enumerate(found):
        answered, value = point.median("requests"), point.median(metric)
        if answered and value:
            yield {
                "stack": point.run.name,
                "load": point.load,
                "order": order,
                "answered": answered.value,
                "value": value.value,
                "low": value.value if value.low is None else value.low,
                "high": value.value if value.high is None else value.high,
                "repeats": value.repeats,
            }


def goodput(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the requests per second within the SLO against those offered."""
    for order, point in enumerate(found):
        rate, value = point.repeats[0].rate, point.median("goodput")
        if rate is not None and value:
            yield {
                "stack": point.run.name,
                "offered": rate,
                "order": order,
                "value": value.value,
                "low": value.value if value.low is None else value.low,
                "high": value.value if value.high is None else value.high,
                "repeats": value.repeats,
            }


def distribution(found: Iterable[Point], field: str) -> Iterator[dict[str, Any]]:
    """Yield the share of requests, or tokens, that took at most that many ms."""
    for point in found:
        indexes = {repeat.index for repeat in point.repeats}
        values = sorted(
            value
            for one in point.run.requests
            if one.repeat in indexes and one.error is None
            for value in _times(one, field)
        )
        for share in _QUANTILES if values else ():
            at = round(share / 100 * (len(values) - 1))
            ms = max(1e3 * values[at], _LEAST_MS)
            yield {"stack": point.run.name, "ms": ms, "share": share / 100}


def _times(record: RequestRecord, field: str) -> Sequence[float]:
    if field == "itl_s":
        return record.itl_s
    return [] if record.ttft_s is None else [record.ttft_s]


def comparable(found: Sequence[Point]) -> list[Point]:
    """Return each run's point at the load that is closest to what all of them can take.

    That is the lowest of the loads at which a run has its highest goodput; without an SLO, at
    which it answers most.
    """
    by_run: dict[str, list[Point]] = {}
    for point in found:
        by_run.setdefault(point.run.name, []).append(point)
    if not by_run:
        return []
    target = min(_offered(max(points, key=worth)) for points in by_run.values())
    return [min(points, key=lambda one: _distance(one, target)) for points in by_run.values()]


def worth(point: Point) -> float:
    """Return the goodput of a point; without an SLO, the requests answered per second."""
    found = point.median("goodput") or point.median("requests")
    return found.value if found else 0.0


def load_text(same: Sequence[Point]) -> str:
    """Return the load of comparable points in words."""
    loads = dict.fromkeys(point.load for point in same)
    if len(loads) < 2:
        return "".join(loads)
    ends = sorted(same, key=_offered)
    first = ends[0].load.partition(" ")[0]
    return f"{first} to {ends[-1].load} (each stack's nearest load)"


def _distance(point: Point, target: float) -> float:
    return abs(math.log((_offered(point) or 1.0) / (target or 1.0)))


def _offered(point: Point) -> float:
    first = point.repeats[0]
    return first.rate or first.concurrency or 0.0


def stages(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the mean ms of a request in each stage; stages do not overlap."""
    for point in found:
        ms: dict[str, float] = {}
        for (role, stage), name in _STAGES.items():
            found_s = (_own_s(role, one.stages.get(role, {})) for one in point.repeats)
            known = [own[stage] for own in found_s if stage in own]
            if known:
                ms[name] = ms.get(name, 0.0) + 1e3 * median(known)
        for name in sorted(ms, key=STAGE_ORDER.index):
            yield {
                "stack": point.run.name,
                "stage": name,
                "order": STAGE_ORDER.index(name),
                "ms": ms[name],
            }


def _own_s(role: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage; of prefill, without those of the stages within it."""
    own = dict(seconds)
    if "prefill" in own:
        own["prefill"] = prefill_s(seconds)
    if role == "consumer" and "load" not in own and "prefill" in own:
        own["load and prefill"] = own.pop("prefill")  # LMCache's server loads, and does not tell
    return own


def sources(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the share of prompt tokens by where their KV came from."""
    for point in found:
        hits = [one.hits for one in point.repeats if one.hits]
        totals = {name: sum(getattr(one, name) for one in hits) for name in SOURCES}
        every = sum(totals.values())
        for at, (name, tokens) in enumerate(totals.items()):
            if every:
                yield {
                    "stack": point.run.name,
                    "source": SOURCES[name],
                    "order": at,
                    "share": tokens / every,
                }
