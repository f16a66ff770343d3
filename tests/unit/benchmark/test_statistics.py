"""Statistics on simulated repeats whose truth is known. Seeded, so the same on every machine.

`PDKIT_LONG_STATISTICS=1` repeats the coverage with many more trials, sizes and kinds of noise.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence

import pytest

from deploy.benchmark.statistics import (
    LEAST_REPEATS,
    MOST_REPEATS,
    Estimate,
    median_of,
    noise,
    paired_ratio,
    repeats_for,
    separate_ratio,
)

LONG = bool(os.environ.get("PDKIT_LONG_STATISTICS"))
TRIALS = 6000 if LONG else 1000
COUNTS = (5, 6, 7, 8, 10, 15, 25) if LONG else (5, 10)
FACTOR = 1.4
Draw = Callable[[random.Random], float]

# Relative noise of a repeat, as its logarithm; the median of each is 0.
NOISE: dict[str, Draw] = {
    "normal": lambda source: source.gauss(0, 0.1),
    "outliers": lambda source: source.gauss(0, 0.1) * (4 if source.random() < 0.1 else 1),
}


def repeats(source: random.Random, draw: Draw, count: int, factor: float = 1.0) -> list[float]:
    return [factor * math.exp(draw(source)) for _ in range(count)]


def covered(truth: float, estimates: Sequence[Estimate]) -> float:
    """Return the share of intervals that hold the truth."""
    inside = [
        one.low <= truth <= one.high
        for one in estimates
        if one.low is not None and one.high is not None
    ]
    assert len(inside) == len(estimates)
    return sum(inside) / len(inside)


@pytest.mark.full
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", NOISE if LONG else ["normal"])
class TestCoverage:
    def test_the_interval_of_a_median_has_its_coverage(self, kind: str, count: int) -> None:
        source = random.Random(1)
        found = [median_of(repeats(source, NOISE[kind], count)) for _ in range(TRIALS)]
        assert 0.93 <= covered(1.0, found) <= 0.97

    def test_the_interval_of_interleaved_repeats_has_its_coverage(
        self, kind: str, count: int
    ) -> None:
        source, found = random.Random(2), []
        for _ in range(TRIALS):
            first = repeats(source, NOISE[kind], count, FACTOR)
            found.append(paired_ratio(first, repeats(source, NOISE[kind], count)))
        assert 0.93 <= covered(FACTOR, found) <= 0.97

    def test_the_interval_of_separate_runs_has_its_coverage(self, kind: str, count: int) -> None:
        source, found = random.Random(3), []
        for _ in range(TRIALS):
            first = repeats(source, NOISE[kind], count, FACTOR)
            found.append(separate_ratio(first, repeats(source, NOISE[kind], count + 2)))
        # Conservative with outliers, whose two intervals are wide already.
        assert 0.93 <= covered(FACTOR, found) <= (0.97 if kind == "normal" else 0.98)


class TestRatio:
    def test_a_known_factor_is_found(self) -> None:
        source = random.Random(4)
        slow = repeats(source, NOISE["normal"], 12, FACTOR)
        found = paired_ratio(slow, repeats(source, NOISE["normal"], 12))
        assert found.low is not None
        assert found.high is not None
        assert 1 < found.low < FACTOR < found.high < 1.7
        assert found.difference == "higher"

    def test_the_reverse_comparison_is_the_inverse(self) -> None:
        first, second = [1.0, 1.1, 1.2, 0.9, 1.05], [2.0, 2.1, 2.0, 2.2, 1.9]
        there, back = paired_ratio(first, second), paired_ratio(second, first)
        assert (there.difference, back.difference) == ("lower", "higher")
        assert there.low is not None
        assert back.high is not None
        assert there.low == pytest.approx(1 / back.high)

    def test_equal_conditions_do_not_differ(self) -> None:
        source = random.Random(5)
        first, second = (repeats(source, NOISE["normal"], 8) for _ in range(2))
        assert paired_ratio(first, second).difference == "no significant difference"

    def test_drift_cancels_only_between_pairs(self) -> None:
        drift = [1.0, 1.3, 1.7, 2.2, 2.8, 3.6]
        first = [1.2 * value for value in drift]
        assert paired_ratio(first, drift).difference == "higher"
        assert separate_ratio(first, drift).difference == "no significant difference"

    def test_few_repeats_have_no_interval(self) -> None:
        values = [1.0] * (LEAST_REPEATS - 1)
        found = paired_ratio([2.0] * len(values), values)
        assert (found.value, found.low, found.high) == (pytest.approx(2.0), None, None)
        assert found.difference == "too few repeats"
        assert separate_ratio(values, [1.0] * 9).difference == "too few repeats"

    def test_equal_values_have_a_ratio_without_noise(self) -> None:
        found = paired_ratio([3.0] * 5, [2.0] * 5)
        assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))
        assert found.difference == "higher"

    def test_zeros_and_too_few_values_have_no_ratio(self) -> None:
        with pytest.raises(ValueError, match="above 0"):
            paired_ratio([0.0, 1.0], [1.0, 1.0])
        with pytest.raises(ValueError, match="shorter"):
            paired_ratio([1.0, 1.0], [1.0])


class TestNumberOfRepeats:
    @pytest.mark.parametrize(
        ("spread", "within", "count"),
        [(0.0, 0.05, LEAST_REPEATS), (0.05, 0.05, 7), (0.1, 0.05, 26), (0.5, 0.01, MOST_REPEATS)],
    )
    def test_more_noise_needs_more_repeats(self, spread: float, within: float, count: int) -> None:
        assert repeats_for(spread, within) == count

    def test_the_number_of_repeats_gives_the_wanted_width(self) -> None:
        source, widths = random.Random(6), []
        count = repeats_for(0.1, 0.07)
        for _ in range(200):
            found = median_of(repeats(source, NOISE["normal"], count))
            assert found.low is not None
            assert found.high is not None
            widths.append(math.log(found.high / found.low) / 2)
        assert sum(widths) / len(widths) == pytest.approx(math.log(1.07), rel=0.1)

    def test_noise_is_relative(self) -> None:
        values = [0.9, 1.0, 1.1, 1.05]
        assert noise(values) == pytest.approx(noise([1000 * value for value in values]))
        assert noise([1.0]) == 0.0
