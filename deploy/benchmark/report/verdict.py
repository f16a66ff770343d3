"""The verdict on several runs: which stack answers most, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from deploy.benchmark.compare import by_load, differences
from deploy.benchmark.facts import StackFacts
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import LEAST_REPEATS, Estimate, Ratio, median_of, ratio_of
from deploy.benchmark.sweep import SWEEP_FILE, Sweep, read_sweep
from deploy.benchmark.verdict import DO_NOT, BenchVerdict, Terms, decide

_ONE_SEARCH = (
    "Each stack has fewer than five searches: the interval leaves out how much searches differ, "
    "and so is too narrow. Repeat the runs before you rely on it."
)


@dataclass(frozen=True)
class Capacity:
    """The most that a stack answered within the SLO in all its runs; without an SLO, at all.

    Attributes:
        rate: requests per second of all GPUs together.
        size: number of GPUs, or of engines on CPUs.
    """

    result: Result
    rate: Estimate
    size: int

    @property
    def name(self) -> str:
        """What reports call the stack."""
        return stack_name(self.result)


def stack_name(result: Result) -> str:
    """Return a short name of the stack that was loaded, as a sweep names it."""
    stack = result.stack
    return f"{stack.topology}:tp{stack.tp}" if stack.tp > 1 else stack.topology


def stack_names(results: Sequence[Result]) -> list[str]:
    """Return a name for each run, with a number where several have the same stack."""
    names = [stack_name(one) for one in results]
    return [
        f"{name} #{names[:at].count(name) + 1}" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]


def is_aggregated(result: Result) -> bool:
    """Return whether every engine does both prefill and decode: 3a, 3a+redis."""
    return result.stack.topology.partition("+")[0].endswith("a")


def capacity(runs: Sequence[Result], *, searched: bool) -> Capacity | None:
    """Return the capacity of a stack from its runs; None if no request was answered in time.

    Args:
        searched: it is the highest rate that held the SLO; else the median at the best load.
    """
    rate = _searched_rate(runs) if searched else _best_rate(runs)
    first = runs[0]
    return Capacity(first, rate, first.stack.units) if rate and rate.value > 0 else None


def _searched_rate(runs: Sequence[Result]) -> Estimate | None:
    """Return the median of the searches; with too few, the interval spans their own intervals."""
    searches = [one.rate_search for one in runs if one.rate_search]
    rate = median_of([one.highest_rate or 0.0 for one in searches])
    if rate.low is not None:
        return rate
    ends = [(one.low, one.high) for one in searches]
    low = [low for low, _ in ends if low is not None]
    high = [high for _, high in ends if high is not None]
    if len(low) < len(ends) or len(high) < len(ends):
        return rate
    return Estimate(rate.value, min(low), max(high), rate.repeats)


def _best_rate(runs: Sequence[Result]) -> Estimate | None:
    field = "goodput_per_s" if runs[0].slo else "requests_per_s"
    groups = [
        [value for one in repeats if (value := getattr(one, field)) is not None]
        for repeats in by_load([one for run in runs for one in run.repeats]).values()
    ]
    best = max((values for values in groups if values), key=median, default=[])
    return median_of(best) if best else None


def verdict(results: Sequence[Result]) -> BenchVerdict:
    """Return the verdict on runs with equal settings."""
    unlike = {one.field for other in results[1:] for one in differences(results[0], other)}
    shares = {one.rate_search.required_share for one in results if one.rate_search}
    if len(shares) > 1:
        unlike.add("rate_search.required_share")
    if unlike:
        return BenchVerdict(
            "cannot tell", f"No verdict: the runs differ ({', '.join(sorted(unlike))})."
        )
    searched = all(one.rate_search for one in results)
    goal = _goal(results[0], searched=searched)
    stacks = _stacks(results)
    found = [one for runs in stacks if (one := capacity(runs, searched=searched))]
    if len(stacks) == 1:
        return BenchVerdict("one run", _of_one(results[0], found, goal))
    whole = [one for one in results if is_aggregated(one)]
    if len(whole) in {0, len(results)}:
        return BenchVerdict("cannot tell", _ranking(found, goal))
    baseline = _best([one for one in found if is_aggregated(one.result)])
    split = _best([one for one in found if not is_aggregated(one.result)])
    if baseline and split:
        return _decided(split, baseline, goal, "searches" if searched else "repeats")
    return _without_ratio(baseline, split, goal)


def note(results: Sequence[Result], found: BenchVerdict) -> str:
    """Return what limits the verdict on runs; "" if nothing does."""
    searched = all(one.rate_search for one in results)
    few = searched and min(map(len, _stacks(results))) < LEAST_REPEATS
    return _ONE_SEARCH if few and found.ratio else ""


def sweep_of(folders: Sequence[Path]) -> Sweep | None:
    """Return the sweep that these are the runs of; None if they are not.

    Its verdict pairs the rounds, in which the topologies ran soon after one another.
    """
    parent = folders[0].parent
    if {one.parent for one in folders} != {parent} or not (parent / SWEEP_FILE).exists():
        return None
    return read_sweep(parent)


def _stacks(results: Sequence[Result]) -> list[list[Result]]:
    """Return the runs of each stack."""
    stacks: list[StackFacts] = []
    for one in results:
        if one.stack not in stacks:
            stacks.append(one.stack)
    return [[one for one in results if one.stack == stack] for stack in stacks]


def _best(found: Sequence[Capacity]) -> Capacity | None:
    return max(found, key=lambda one: one.rate.value / one.size, default=None)


def _decided(split: Capacity, baseline: Capacity, goal: str, repeats: str) -> BenchVerdict:
    ratio = _per_unit(ratio_of(split.rate, baseline.rate), baseline.size / split.size)
    unit = None if split.size == baseline.size else split.result.stack.unit
    terms = Terms(unit, goal, repeats, margin=1.0)  # the interval alone decides
    return decide(ratio, split.name, baseline.name, terms)


def _per_unit(ratio: Ratio, factor: float) -> Ratio:
    low, high = (None if end is None else end * factor for end in (ratio.low, ratio.high))
    return Ratio(ratio.value * factor, low, high, ratio.repeats)


def _of_one(result: Result, found: Sequence[Capacity], goal: str) -> str:
    if not found:
        return f"{stack_name(result)} answers no request {goal}."
    rate, stack = found[0].rate, result.stack
    ends = "" if rate.low is None else f" ({rate.low:.2f} to {rate.high:.2f})"
    each = f"{rate.value / stack.units:.2f} for each of {stack.units} {stack.unit}s"
    said = f"{found[0].name} holds {rate.value:.2f} requests/s{ends} {goal}: {each}."
    return f"{said} A verdict needs a run of another stack."


def _without_ratio(baseline: Capacity | None, split: Capacity | None, goal: str) -> BenchVerdict:
    """Return the verdict where no split, or no aggregated stack, answered a request in time."""
    if split:
        said = f"Only {split.name} answers requests {goal}."
        return BenchVerdict("disaggregate", said, split.name, split.name)
    if baseline:
        said = f"{DO_NOT}: only {baseline.name} answers requests {goal}."
        return BenchVerdict("do not", said, baseline.name, None, baseline.name)
    return BenchVerdict("cannot tell", f"No stack answers requests {goal}.")


def _ranking(found: Sequence[Capacity], goal: str) -> str:
    rates = ", ".join(
        f"{one.name} {one.rate.value / one.size:.2f}"
        for one in sorted(found, key=lambda one: -one.rate.value / one.size)
    )
    if not rates:
        return f"No stack answers requests {goal}."
    unit = found[0].result.stack.unit
    return (
        f"Requests/s for each {unit} {goal}: {rates}. For a verdict, run a split and an "
        "aggregated stack."
    )


def _goal(result: Result, *, searched: bool) -> str:
    if not result.slo:
        return "without an SLO"
    share = result.rate_search.required_share if searched and result.rate_search else None
    requests = "" if share is None else f" for {100 * share:g} % of requests"
    return f"within {slo_text(result)}{requests}"


def slo_text(result: Result) -> str:
    """Return the limits as they are read; "" without an SLO."""
    limits: Mapping[str, float | None] = result.slo.model_dump() if result.slo else {}
    names = {"ttft_s": "TTFT", "itl_s": "ITL", "e2e_s": "end to end"}
    return ", ".join(
        f"{names[field]} {_seconds(limit)}" for field, limit in limits.items() if limit is not None
    )


def _seconds(limit: float) -> str:
    return f"{limit:g} s" if limit >= 1 else f"{1e3 * limit:g} ms"
