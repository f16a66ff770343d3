"""Sweeps of a machine whose truth is known, again and again: verdicts, intervals, and their price.

What a topology can take varies from start to start and from pass to pass, as it does on machines.
`PDKIT_LONG_STATISTICS=1` repeats the coverage with other amounts of noise.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from deploy.benchmark.results import RequestRecord, Slo
from deploy.benchmark.slo import RateFinder
from deploy.benchmark.sweep import Sweep, SweepRun, judged, starting_rate

LONG = bool(os.environ.get("PDKIT_LONG_STATISTICS"))
SWEEPS = 1000
# Of starts and of passes, relative.
NOISES = ((0.0, 0.0), (0.02, 0.01), (0.03, 0.02), (0.08, 0.05)) if LONG else ((0.03, 0.02),)
SLO = Slo(ttft_s=1.0)
GOOD = RequestRecord(
    repeat=0, index=0, arrival_s=0.0, ttft_s=0.1, itl_s=[], e2e_s=0.1, input_tokens=1,
    output_tokens=1, error=None,
)  # fmt: skip
BAD = GOOD.model_copy(update={"ttft_s": 9.0})


@dataclass
class Simulated:
    """A machine on which topologies hold `rates`, more or less."""

    rates: Mapping[str, float]
    start_noise: float
    pass_noise: float
    chance: random.Random = field(default_factory=random.Random)
    searches: int = 0
    passes: int = 0

    def swept(self, seed: int) -> Sweep:
        self.chance = random.Random(seed)
        sweep = Sweep(
            started="", command=[], key="", unit="engine", slo="ttft=1s", rounds=5,
            topologies=list(self.rates), refused={}, runs=[],
        )  # fmt: skip
        while sweep.left:
            name, number = sweep.left[0]
            start = starting_rate(sweep, name, number, seed) or 5.0
            run = SweepRun(
                topology=name, round=number, folder=None, seconds=1.0, rate=self._held(name, start)
            )
            sweep = sweep.model_copy(update={"runs": [*sweep.runs, run]})
        return judged(sweep)

    def _held(self, name: str, start: float) -> float | None:
        can = self.rates[name] * self._noise(self.start_noise)
        finder = RateFinder(start, 0.9, 10)
        while (rate := finder.next_rate()) is not None:
            finder.add(rate, [GOOD if rate <= can * self._noise(self.pass_noise) else BAD], SLO)
        self.searches += 1
        self.passes += len(finder.steps)
        return max((step.rate for step in finder.steps if step.held), default=None)

    def _noise(self, spread: float) -> float:
        return math.exp(self.chance.gauss(0, spread))


def simulated(factor: float, start_noise: float = 0.03, pass_noise: float = 0.02) -> Simulated:
    return Simulated({"2a": 20.0, "1p1d": 20.0 * factor}, start_noise, pass_noise)


@pytest.mark.parametrize(
    ("factor", "winner", "words"),
    [
        (1.3, "1p1d", "1p1d holds 1."),
        (1.0, "2a", "No significant difference between 1p1d and 2a"),
        (0.75, "2a", "Do not disaggregate this workload here: 2a holds 1."),
    ],
)
def test_repeated_sweeps_have_the_same_verdict(factor: float, winner: str, words: str) -> None:
    machine = simulated(factor)
    for seed in range(20):
        verdict = machine.swept(seed).verdict
        assert verdict is not None
        assert verdict.winner == winner
        assert verdict.sentence.startswith(words)


@pytest.mark.full
@pytest.mark.parametrize("noise", NOISES)
def test_intervals_hold_the_true_factor(noise: tuple[float, float]) -> None:
    """Though searches stop at steps of 10 %, because each begins elsewhere."""
    inside = 0
    for seed in range(SWEEPS):
        factor = random.Random(seed).uniform(1.0, 1.4)
        verdict = simulated(factor, *noise).swept(seed).verdict
        assert verdict is not None
        ratio = verdict.ratio
        assert ratio is not None
        inside += (ratio.low or 0) <= factor <= (ratio.high or 0)
    assert 0.93 <= inside / SWEEPS <= 0.97


def test_a_search_needs_few_rates() -> None:
    machine = simulated(1.3)
    for seed in range(20):
        machine.swept(seed)
    assert machine.passes / machine.searches < 4
