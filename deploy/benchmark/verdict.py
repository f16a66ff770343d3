"""The verdict on two topologies, of a sweep or of single runs: one rule and one wording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.benchmark.slo import RESOLUTION
from deploy.benchmark.statistics import LEAST_REPEATS, Ratio

DO_NOT = "Do not disaggregate this workload here"
VerdictKind = Literal["disaggregate", "do not", "no difference", "cannot tell", "one run"]


@dataclass(frozen=True)
class BenchVerdict:
    """What runs show.

    Attributes:
        winner: the topology to run; the baseline unless another is shown to be better.
        disaggregated, baseline: the best topology of each kind; None without a rate.
        ratio: the best disaggregated topology's rate per GPU or engine / the best aggregated one's.
    """

    kind: VerdictKind
    sentence: str
    winner: str | None = None
    disaggregated: str | None = None
    baseline: str | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Terms:
    """By what two topologies are compared.

    Attributes:
        unit: what rates are divided by, where the two differ in size.
        goal: what requests had to keep; "" if nothing.
        rounds: what is counted: rounds of a sweep, or repeats of a run.
        margin: the smallest ratio that counts as a difference.
    """

    unit: str | None
    goal: str
    rounds: str = "rounds"
    margin: float = RESOLUTION


def decide(ratio: Ratio, split: str, whole: str, terms: Terms) -> BenchVerdict:
    """Return the verdict on the best disaggregated topology and the best aggregated one.

    Without a clear winner it is the aggregated one, which is simpler.
    """
    said, better = comparison(ratio, split, whole, terms), shown(ratio, terms.margin)
    kinds: dict[int, VerdictKind] = {1: "disaggregate", -1: "do not", 0: "no difference"}
    return BenchVerdict(
        "cannot tell" if ratio.low is None else kinds[better],
        f"{DO_NOT}: {said}" if better < 0 else said,
        split if better > 0 else whole,
        split,
        whole,
        ratio,
    )


def shown(ratio: Ratio, margin: float = RESOLUTION) -> int:
    """Return 1 if the first is shown to be better, -1 if the second is, else 0.

    The search of a run stops at rates that differ by less than its resolution: smaller margins may
    be its own.
    """
    if ratio.difference == "higher" and ratio.value >= margin:
        return 1
    return -1 if ratio.difference == "lower" and ratio.value <= 1 / margin else 0


def comparison(ratio: Ratio, first: str, second: str, terms: Terms) -> str:
    """Return in words how two topologies compare; the better one comes first."""
    what = f"the rate per {terms.unit} of" if terms.unit else "the rate of"
    under = f" {terms.goal}" if terms.goal else ""
    if ratio.low is None or ratio.high is None:
        return (
            f"Too few {terms.rounds} to tell {first} from {second}: both ran {ratio.repeats} "
            f"times, and an interval needs {LEAST_REPEATS}."
        )
    if shown(ratio, terms.margin) < 0:
        times = f"{1 / ratio.value:.2f} times ({1 / ratio.high:.2f} to {1 / ratio.low:.2f})"
        return f"{second} holds {times} {what} {first}{under}."
    times = f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"
    if shown(ratio, terms.margin) > 0:
        return f"{first} holds {times} {what} {second}{under}."
    return (
        f"No significant difference between {first} and {second} in {ratio.repeats} "
        f"{terms.rounds}: {first} holds {times} {what} {second}{under}."
    )
