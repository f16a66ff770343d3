"""Two runs side by side: what differs, by how much, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from deploy.benchmark.facts import StackFacts
from deploy.benchmark.results import Percentiles, Repeat, Result
from deploy.benchmark.statistics import Estimate, Ratio, median_of, separate_ratio
from deploy.errors import UsageError

# What must be alike, or the ratio is not one of the stacks. How busy the machine was may differ.
_ALIKE = ("model", "workload", "machine", "versions", "slo", "seed")
_MAY_DIFFER = {"machine.load_1m"}
# Plain aggregated engines have neither, so that these can be alike only between stacks with Redis.
_OF_REDIS = {"versions.lmcache", "versions.redis"}
NOT_INTERLEAVED = (
    "The runs were not interleaved: the intervals cover the noise within each run, not what "
    "changed on the machine between them"
)

_SHOWN = 3  # loads that an error names

Unit = Literal["ms", "1/s", "%"]


class Metric(NamedTuple):
    """A number that each repeat has; None if it does not."""

    name: str
    unit: Unit
    of: Callable[[Repeat], float | None]
    higher_is_better: bool


class Difference(NamedTuple):
    """A field in which two runs are unlike, with both values."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class MetricRow:
    """One metric at one load.

    Attributes:
        ratio: second / first; None if a value is 0.
    """

    metric: Metric
    first: Estimate
    second: Estimate
    ratio: Ratio | None

    @property
    def verdict(self) -> str:
        """What the second run is beside the first: better, worse, or not known to differ."""
        if self.ratio is None:
            return "no ratio: a repeat has 0"
        if self.ratio.difference in ("higher", "lower"):
            better = (self.ratio.difference == "higher") == self.metric.higher_is_better
            return "better" if better else "worse"
        return self.ratio.difference

    def as_dict(self) -> dict[str, Any]:
        """Return the metric as `bench compare --json` shows it."""
        return {
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "first": self.first.as_dict(),
            "second": self.second.as_dict(),
            "ratio": self.ratio.as_dict() if self.ratio else None,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows by load, and in which fields the runs are unlike."""

    points: Mapping[str, Sequence[MetricRow]]
    unlike: Sequence[Difference]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the data of `bench compare --json`."""
        return {
            "points": [
                {"load": load, "metrics": [row.as_dict() for row in rows]}
                for load, rows in self.points.items()
            ],
            "unlike": [one._asdict() for one in self.unlike],
            "notes": list(self.notes),
        }


def compare(first: Result, second: Result, *, anyway: bool = False) -> Comparison:
    """Return two runs side by side, at each load that both had.

    Raises:
        UsageError: the runs are unlike and `anyway` is not set, or have no load in common.
    """
    unlike = differences(first, second)
    if not anyway:
        require_alike(unlike)
    ours, theirs = by_load(first.repeats), by_load(second.repeats)
    stacks = first.stack, second.stack
    points = {load: _rows(ours[load], theirs[load], stacks) for load in ours if load in theirs}
    if not points:
        raise UsageError(
            f"the runs have no load in common: {_few(ours)}; and {_few(theirs)}",
            hint="run deploy bench with the same --rate or --concurrency for both",
        )
    return Comparison(points, unlike, list(_notes({"A": first, "B": second})))


def require_alike(unlike: Sequence[Difference]) -> None:
    """Refuse to compare what was measured under different conditions.

    Raises:
        UsageError: naming the differences.
    """
    if unlike:
        raise UsageError(
            f"the runs differ in: {', '.join(one.field for one in unlike)}",
            details=tuple(f"{one.field}: {one.first} and {one.second}" for one in unlike),
            hint="compare runs of the same kind, or add --anyway",
        )


def _few(loads: Mapping[str, object]) -> str:
    shown = list(loads)[:_SHOWN]
    more = f" and {len(loads) - _SHOWN} more" if len(loads) > _SHOWN else ""
    return f"{', '.join(shown) or 'none'}{more}"


def differences(first: Result, second: Result) -> list[Difference]:
    """Return the fields that must be alike and are not."""
    conditions = ({name: getattr(one, name) for name in _ALIKE} for one in (first, second))
    return unlike_conditions(*conditions, both_redis=first.stack.redis and second.stack.redis)


def unlike_conditions(
    first: Mapping[str, Any], second: Mapping[str, Any], *, both_redis: bool
) -> list[Difference]:
    """Return the conditions that differ, field by field."""
    left_out = _MAY_DIFFER if both_redis else _MAY_DIFFER | _OF_REDIS
    return [
        found
        for name, value in first.items()
        for found in _unlike(name, _plain(value), _plain(second[name]))
        if found.field not in left_out
    ]


def by_load(repeats: Sequence[Repeat]) -> dict[str, list[Repeat]]:
    """Return the repeats by what was offered to the stack."""
    found: dict[str, list[Repeat]] = {}
    for repeat in repeats:
        found.setdefault(load_of(repeat), []).append(repeat)
    return found


def load_of(repeat: Repeat) -> str:
    """Return the load of a repeat in words."""
    if repeat.rate is not None:
        return f"{repeat.rate:.4g} requests/s offered"
    if repeat.concurrency is not None:
        return f"{repeat.concurrency} in flight"
    return "arrival times of the trace"


def _metrics() -> Iterator[Metric]:
    for name, field in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("end to end", "e2e_s")):
        for percentile in ("p50", "p90", "p99"):
            yield Metric(f"{name} {percentile}", "ms", _latency(field, percentile), False)
    yield Metric("requests", "1/s", lambda one: one.requests_per_s, True)
    yield Metric("input tokens", "1/s", lambda one: one.input_tokens_per_s, True)
    yield Metric("output tokens", "1/s", lambda one: one.output_tokens_per_s, True)
    yield Metric("goodput", "1/s", lambda one: one.goodput_per_s, True)
    yield Metric("within the SLO", "%", lambda one: one.within_slo, True)


def _latency(field: str, percentile: str) -> Callable[[Repeat], float | None]:
    def value(repeat: Repeat) -> float | None:
        found: Percentiles | None = getattr(repeat, field)
        return None if found is None else getattr(found, percentile)

    return value


METRICS = tuple(_metrics())


def median_metric(metric: Metric, values: Sequence[float]) -> Estimate | None:
    """Return the median of a metric's values; None without any."""
    return median_of(values, most=1.0 if metric.unit == "%" else math.inf) if values else None


def values_of(metric: Metric, repeats: Sequence[Repeat]) -> list[float]:
    """Return a metric of the repeats that have it."""
    return [value for one in repeats if (value := metric.of(one)) is not None]


def _rows(
    first: Sequence[Repeat], second: Sequence[Repeat], stacks: tuple[StackFacts, StackFacts]
) -> list[MetricRow]:
    """Return all metrics; rates per GPU or engine, too, if the stacks have not as many of them."""
    ours, theirs = stacks
    rows: list[MetricRow] = []
    for metric in METRICS:
        found, others = values_of(metric, first), values_of(metric, second)
        rows += _row(metric, found, others)
        if metric.unit == "1/s" and ours.units != theirs.units:
            each = metric._replace(name=f"{metric.name} per {ours.unit}")
            rows += _row(
                each,
                [value / ours.units for value in found],
                [value / theirs.units for value in others],
            )
    return rows


def _row(metric: Metric, first: Sequence[float], second: Sequence[float]) -> list[MetricRow]:
    """Return a metric's row, if both sides have it."""
    ours, theirs = median_metric(metric, first), median_metric(metric, second)
    if not ours or not theirs:
        return []
    ratio = separate_ratio(second, first) if min(*first, *second) > 0 else None
    return [MetricRow(metric, ours, theirs, ratio)]


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _unlike(name: str, first: Any, second: Any) -> Iterator[Difference]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from _unlike(f"{name}.{key}", first.get(key), second.get(key))
    elif name == "machine.gpus" and first and second and set(first) == set(second):
        return  # the stacks use more of them, or fewer
    elif first != second:
        yield Difference(name, first, second)


def _notes(runs: Mapping[str, Result]) -> Iterator[str]:
    for side, run in runs.items():
        sent, failed = (sum(getattr(one, f) for one in run.repeats) for f in ("sent", "failed"))
        if failed:
            yield f"{side}: {failed} of {sent} requests failed; latencies are of answered ones"
        if run.interrupted:
            yield f"{side}: interrupted; only the finished repeats are compared"
    if len({run.stack.units for run in runs.values()}) > 1:
        each = " and ".join(f"{side} {run.stack.units}" for side, run in runs.items())
        yield f"The stacks have different numbers of GPUs or engines: {each}"
    yield NOT_INTERLEAVED
