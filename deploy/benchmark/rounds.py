"""How many rounds a sweep needs for an interval of a certain width."""

from __future__ import annotations

from deploy.benchmark.statistics import noise, repeats_for
from deploy.benchmark.sweep import Sweep, by_round, judge


def rounds_for(sweep: Sweep, within: float) -> int:
    """Return the rounds that give the verdict's ratio ± `within`, by the noise of those done.

    No more than now where there is nothing to compare, or one of both has not run in each round.
    """
    verdict = judge(sweep)
    if verdict.disaggregated is None or verdict.baseline is None:
        return sweep.rounds
    split, whole = (by_round(sweep, name) for name in (verdict.disaggregated, verdict.baseline))
    if not len(split) == len(whole) == sweep.rounds:
        return sweep.rounds
    return max(sweep.rounds, repeats_for(noise([split[at] / whole[at] for at in split]), within))
