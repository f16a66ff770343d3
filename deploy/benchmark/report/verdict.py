"""The verdict of several runs in a sentence: which stack answers most, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from deploy.benchmark.compare import by_load, differences
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import LEAST_REPEATS, Estimate, Ratio, median_of, ratio_of

Kind = Literal["disaggregate", "do not", "no difference", "cannot tell", "one run"]


@dataclass(frozen=True)
class Capacity:
    """The most that a run's stack answered within the SLO; without an SLO, at all.

    Attributes:
        rate: requests per second, all GPUs together.
        size: GPUs, or engines where there are none.
    """

    result: Result
    rate: Estimate
    size: int

    @property
    def name(self) -> str:
        return stack_name(self.result)


@dataclass(frozen=True)
class Verdict:
    """What the runs show.

    Attributes:
        ratio: the best disaggregated stack / the best aggregated one, per GPU or engine.
    """

    kind: Kind
    sentence: str
    ratio: Ratio | None = None


def stack_name(result: Result) -> str:
    """Return a short name of the stack that was loaded."""
    stack = result.stack
    parts = [stack.topology]
    if is_aggregated(result) and stack.redis:
        parts.append("with Redis")
    if stack.tp > 1:
        parts.append(f"TP {stack.tp}")
    return " ".join(parts)


def stack_names(results: Sequence[Result]) -> list[str]:
    """Return a name for each run, with a number where several have the same stack."""
    names = [stack_name(one) for one in results]
    return [
        f"{name} #{names[:at].count(name) + 1}" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]


def is_aggregated(result: Result) -> bool:
    """Return whether every engine does both prefill and decode."""
    return result.stack.topology.endswith("a")


def capacity(result: Result) -> Capacity | None:
    """Return a run's capacity; None where no request was answered in time.

    It is what the search for the highest rate found; without one, the median at the best load.
    """
    stack, search = result.stack, result.rate_search
    size = stack.gpus or stack.engines
    if search:
        if search.highest_rate is None:
            return None
        least = LEAST_REPEATS if search.low is not None else 1
        return Capacity(result, Estimate(search.highest_rate, search.low, search.high, least), size)
    field = "goodput_per_s" if result.slo else "requests_per_s"
    groups = [
        [value for one in repeats if (value := getattr(one, field)) is not None]
        for repeats in by_load(result.repeats).values()
    ]
    best = max((values for values in groups if values), key=median, default=[])
    return Capacity(result, median_of(best), size) if best and median(best) > 0 else None


def verdict(results: Sequence[Result]) -> Verdict:
    """Return what these runs show together; only like runs have a verdict."""
    unlike = {one.field for other in results[1:] for one in differences(results[0], other)}
    if unlike:
        return Verdict(
            "cannot tell", f"No verdict: the runs are unlike ({', '.join(sorted(unlike))})."
        )
    found = [one for result in results if (one := capacity(result))]
    if len(results) == 1:
        return _of_one(results[0], found)
    baseline = _best([one for one in found if is_aggregated(one.result)])
    split = _best([one for one in found if not is_aggregated(one.result)])
    held = _goal(results[0])
    if not any(map(is_aggregated, results)) or all(map(is_aggregated, results)):
        return Verdict("cannot tell", _ranking(found, held))
    if baseline is None or split is None:
        return _without_ratio(baseline, split, held)
    return _decided(split, baseline, held)


def _best(found: Sequence[Capacity]) -> Capacity | None:
    return max(found, key=lambda one: one.rate.value / one.size, default=None)


def _decided(split: Capacity, baseline: Capacity, held: str) -> Verdict:
    ratio = _per_unit(ratio_of(split.rate, baseline.rate), baseline.size / split.size)
    each = "" if split.size == baseline.size else f" for each {_unit(split.result)}"
    margin = f"{ratio.value:.2f} times"
    if ratio.low is not None and ratio.high is not None:
        margin += f" ({ratio.low:.2f} to {ratio.high:.2f})"
    rate = f"the rate of {baseline.name}{each} {held}"
    match ratio.difference:
        case "higher":
            return Verdict("disaggregate", f"{split.name} holds {margin} {rate}.", ratio)
        case "lower":
            said = f"Do not disaggregate this workload here: {split.name}, the best split, holds"
            return Verdict("do not", f"{said} {margin} {rate}.", ratio)
        case "no significant difference":
            said = "No difference that this many runs can show"
            return Verdict("no difference", f"{said}: {split.name} holds {margin} {rate}.", ratio)
    said = f"Too few repeats for a verdict: {split.name} holds {margin} {rate}"
    return Verdict("cannot tell", f"{said}; {LEAST_REPEATS} repeats have an interval.", ratio)


def _per_unit(ratio: Ratio, factor: float) -> Ratio:
    low, high = (None if end is None else end * factor for end in (ratio.low, ratio.high))
    return Ratio(ratio.value * factor, low, high, ratio.repeats)


def _of_one(result: Result, found: Sequence[Capacity]) -> Verdict:
    if not found:
        said = f"{stack_name(result)} answered no request {_goal(result)}."
        return Verdict("one run", said)
    rate = found[0].rate
    ends = "" if rate.low is None else f" ({rate.low:.2f} to {rate.high:.2f})"
    said = f"{found[0].name} holds {rate.value:.2f} requests/s{ends} {_goal(result)}."
    return Verdict("one run", f"{said} One run has no verdict.")


def _without_ratio(baseline: Capacity | None, split: Capacity | None, held: str) -> Verdict:
    if split:
        return Verdict("disaggregate", f"Only {split.name} answers requests {held}.")
    if baseline:
        said = "Do not disaggregate this workload here: no split answers requests"
        return Verdict("do not", f"{said} {held}, {baseline.name} does.")
    return Verdict("cannot tell", f"No stack answers requests {held}.")


def _ranking(found: Sequence[Capacity], held: str) -> str:
    rates = ", ".join(
        f"{one.name} {one.rate.value / one.size:.2f}"
        for one in sorted(found, key=lambda one: -one.rate.value / one.size)
    )
    if not rates:
        return f"No stack answers requests {held}."
    unit = _unit(found[0].result)
    return (
        f"Requests/s for each {unit} {held}: {rates}. Whether to disaggregate takes a split and "
        "an aggregated stack."
    )


def _unit(result: Result) -> str:
    return "GPU" if result.stack.gpus else "engine"


def _goal(result: Result) -> str:
    return f"within {slo_text(result)}" if result.slo else "without an SLO"


def slo_text(result: Result) -> str:
    """Return the limits as they are read; "" without an SLO."""
    limits: Mapping[str, float | None] = result.slo.model_dump() if result.slo else {}
    names = {"ttft_s": "TTFT", "itl_s": "ITL", "e2e_s": "end to end"}
    return ", ".join(
        f"{names[field]} {_seconds(limit)}" for field, limit in limits.items() if limit is not None
    )


def _seconds(limit: float) -> str:
    return f"{limit:g} s" if limit >= 1 else f"{1e3 * limit:g} ms"
