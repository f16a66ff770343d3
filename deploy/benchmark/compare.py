"""Two runs side by side: what differs, by how much, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import computed_field

from deploy.benchmark.facts import StackFacts
from deploy.benchmark.results import Percentiles, Repeat, Result
from deploy.benchmark.statistics import Estimate, Ratio, median_of, separate_ratio
from deploy.document import HIDDEN
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


@dataclass(frozen=True)
class UnlikeField:
    """A field in which two runs differ.

    Attributes:
        field: name of the setting.
        first: its value in A.
        second: its value in B.
    """

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class MetricRow:
    """One metric at one load.

    Attributes:
        metric: name of the metric.
        unit: its unit.
        first: value of A.
        second: value of B.
        ratio: second / first; None if a value is 0.
    """

    metric: str
    unit: str
    first: Estimate
    second: Estimate
    ratio: Ratio | None
    higher_is_better: Annotated[bool, HIDDEN]

    @computed_field
    @property
    def verdict(self) -> str:
        """Better, worse, or why neither is known."""
        if self.ratio is None:
            return "no ratio: a repeat has 0"
        if self.ratio.difference in ("higher", "lower"):
            better = (self.ratio.difference == "higher") == self.higher_is_better
            return "better" if better else "worse"
        return self.ratio.difference


@dataclass(frozen=True)
class ComparedLoad:
    """All metrics at one load.

    Attributes:
        load: the load, such as 2 requests/s.
        metrics: one row for each metric.
    """

    load: str
    metrics: Sequence[MetricRow]


@dataclass(frozen=True)
class Comparison:
    """Two results side by side.

    Attributes:
        first: folder of the first result (A).
        second: folder of the second result (B).
        points: metrics at each load that both have.
        unlike: settings in which the runs differ.
        notes: what limits the comparison, a sentence each.
    """

    first: str
    second: str
    points: Sequence[ComparedLoad]
    unlike: Sequence[UnlikeField]
    notes: Sequence[str]


def compare(first: Result, second: Result, *, anyway: bool = False) -> Comparison:
    """Return two runs side by side, at each load that both had; the caller knows their folders.

    Raises:
        UsageError: the runs are unlike and `anyway` is not set, or have no load in common.
    """
    unlike = differences(first, second)
    if not anyway:
        require_alike(unlike)
    ours, theirs = by_load(first.repeats), by_load(second.repeats)
    stacks = first.stack, second.stack
    points = [
        ComparedLoad(load, _rows(ours[load], theirs[load], stacks))
        for load in ours
        if load in theirs
    ]
    if not points:
        raise UsageError(
            f"the runs have no load in common: {_few(ours)}; and {_few(theirs)}",
            hint="run deploy bench with the same --rate or --concurrency for both",
        )
    return Comparison("", "", points, unlike, list(_notes({"A": first, "B": second})))


def require_alike(unlike: Sequence[UnlikeField]) -> None:
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


def differences(first: Result, second: Result) -> list[UnlikeField]:
    """Return the fields that must be alike and are not."""
    conditions = ({name: getattr(one, name) for name in _ALIKE} for one in (first, second))
    return unlike_conditions(*conditions, both_redis=first.stack.redis and second.stack.redis)


def unlike_conditions(
    first: Mapping[str, Any], second: Mapping[str, Any], *, both_redis: bool
) -> list[UnlikeField]:
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
    for name, latency in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("end to end", "e2e_s")):
        for percentile in ("p50", "p90", "p99"):
            yield Metric(f"{name} {percentile}", "ms", _latency(latency, percentile), False)
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
    return [MetricRow(metric.name, metric.unit, ours, theirs, ratio, metric.higher_is_better)]


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _unlike(name: str, first: Any, second: Any) -> Iterator[UnlikeField]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from _unlike(f"{name}.{key}", first.get(key), second.get(key))
    elif name == "machine.gpus" and first and second and set(first) == set(second):
        return  # the stacks use more of them, or fewer
    elif first != second:
        yield UnlikeField(name, first, second)


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
