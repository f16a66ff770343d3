"""What charts and tables show: medians by run and load, distributions, and shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.benchmark.compare import METRICS, by_load, median_metric, values_of
from deploy.benchmark.report.verdict import stack_names
from deploy.benchmark.results import Repeat, RequestRecord, Result
from deploy.benchmark.statistics import Estimate, noise

# Steps of a distribution's curve: enough for the eye, and few enough for a page.
_QUANTILES = (*range(0, 98, 2), 98, 99, 99.5, 100)
# The stages as a request passes them, with the colour's order in the chart.
_STAGES = {
    ("producer", "queue"): "queue before prefill",
    ("producer", "prefill"): "prefill",
    ("aggregated", "queue"): "queue before prefill",
    ("aggregated", "prefill"): "prefill",
    ("consumer", "queue"): "queue before decode",
    ("consumer", "prefill"): "KV load and first token",
    ("consumer", "decode"): "decode",
    ("aggregated", "decode"): "decode",
}
STAGE_ORDER = tuple(dict.fromkeys(_STAGES.values()))
SOURCES = {"external": "loaded from Redis", "local": "engine's own cache", "computed": "computed"}


@dataclass(frozen=True)
class Run:
    """A result with its requests and a name of its own."""

    name: str
    result: Result
    requests: Sequence[RequestRecord]


@dataclass(frozen=True)
class Point:
    """A run at one load."""

    run: Run
    load: str
    repeats: Sequence[Repeat]

    def median(self, metric: str) -> Estimate | None:
        """Return a metric of METRICS, by its name."""
        return median_metric(_METRICS[metric], self.repeats)

    @property
    def noise(self) -> float | None:
        """Relative spread of the TTFT medians."""
        found = values_of(_METRICS["TTFT p50"], self.repeats)
        return noise(found) if len(found) > 1 and min(found) > 0 else None


_METRICS = {metric.name: metric for metric in METRICS}


def named(results: Sequence[tuple[Result, Sequence[RequestRecord]]]) -> list[Run]:
    """Return the runs with names that tell them apart."""
    names = stack_names([result for result, _ in results])
    return [
        Run(name, result, requests) for name, (result, requests) in zip(names, results, strict=True)
    ]


def points(runs: Iterable[Run]) -> list[Point]:
    """Return each run at each of its loads."""
    return [
        Point(run, load, repeats)
        for run in runs
        for load, repeats in by_load(run.result.repeats).items()
    ]


def curve(found: Iterable[Point], metric: str) -> Iterator[dict[str, Any]]:
    """Yield a metric against the requests answered per second, with intervals."""
    for order, point in enumerate(sorted(found, key=_offered)):
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
    for order, point in enumerate(sorted(found, key=_offered)):
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
    """Yield the share of requests, or tokens, that took at most so many ms."""
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
            yield {"stack": point.run.name, "ms": 1e3 * values[at], "share": share / 100}


def _times(record: RequestRecord, field: str) -> Sequence[float]:
    if field == "itl_s":
        return record.itl_s
    return [] if record.ttft_s is None else [record.ttft_s]


def common_load(found: Sequence[Point]) -> list[Point]:
    """Return the points at one load, at which the runs can be compared.

    Of the loads that most runs had, it is the one with the highest goodput of any run; without an
    SLO, the highest load.
    """
    by_load: dict[str, list[Point]] = {}
    for point in found:
        by_load.setdefault(point.load, []).append(point)
    return max(by_load.values(), key=_worth, default=[])


def _worth(same: Sequence[Point]) -> tuple[int, float, float]:
    goodputs = [one.value for point in same if (one := point.median("goodput"))]
    return len(same), max(goodputs, default=0.0), _offered(same[0])


def _offered(point: Point) -> float:
    first = point.repeats[0]
    return first.rate or first.concurrency or 0.0


def stages(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the mean ms of a request in each stage."""
    for point in found:
        for (role, stage), name in _STAGES.items():
            values = [one.stages.get(role, {}).get(stage) for one in point.repeats]
            known = [value for value in values if value is not None]
            if known:
                yield {
                    "stack": point.run.name,
                    "stage": name,
                    "order": STAGE_ORDER.index(name),
                    "ms": 1e3 * median(known),
                }


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
