"""Medians, ratios and their 95 % intervals, from a few repeats.

A repeat is one value: requests of the same repeat share a queue and are not independent. Intervals
are those of a smoothed bootstrap of the median. The distribution of a bootstrap median is known, so
nothing is drawn at random and the same values always give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import NormalDist, median, stdev
from typing import Literal

# The range of n values covers their median with probability 1 - 2^(1 - n): fewer than five cannot
# reach 95 %, whatever the method.
LEAST_REPEATS = 5
MOST_REPEATS = 40
CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2
# Of two intervals that are combined: two of 95 % would cover 97 to 98 %, these cover 95 to 97 %.
_COMBINED_TAIL = 0.04
# The standard error of a median of n normal values is about this many standard deviations / √n.
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
_GRID = 4000

Significance = Literal["higher", "lower", "no significant difference", "too few repeats"]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; low and high are None below LEAST_REPEATS."""

    value: float
    low: float | None
    high: float | None
    repeats: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the JSON shape."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "repeats": self.repeats,
        }


@dataclass(frozen=True)
class Ratio(Estimate):
    """How many times as large one condition's median is as the other's."""

    @property
    def difference(self) -> Significance:
        """Whether the interval excludes 1, and on which side."""
        if self.low is None or self.high is None:
            return "too few repeats"
        if self.low > 1:
            return "higher"
        return "lower" if self.high < 1 else "no significant difference"


def median_of(values: Sequence[float], *, most: float = math.inf) -> Estimate:
    """Return the median of a condition's repeats.

    Args:
        most: what no value exceeds, such as 1 of shares; the interval ends there, too.

    Raises:
        ValueError: there are no values.
    """
    if min(values) > 0:
        interval = _interval(_logs(values))
        low, high = map(math.exp, interval) if interval else (None, None)
    else:  # with a 0 there is no logarithm; the interval stays within what was seen
        interval = _interval(values)
        low, high = interval or (None, None)
        low = None if low is None else max(low, min(values))
    return Estimate(median(values), low, None if high is None else min(high, most), len(values))


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Return first / second from interleaved repeats: the median of the ratios of each pair.

    What changes slowly on the machine meets both sides of a pair alike, and cancels.

    Raises:
        ValueError: the lengths differ, or a value is not above 0.
    """
    logs = [a - b for a, b in zip(_logs(first), _logs(second), strict=True)]
    interval = _interval(logs)
    low, high = map(math.exp, interval) if interval else (None, None)
    return Ratio(math.exp(median(logs)), low, high, len(logs))


def separate_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Return first / second of two runs that were not interleaved: the ratio of their medians.

    Raises:
        ValueError: there are no values, or one is not above 0.
    """
    return ratio_of(_positive(first), _positive(second))


def ratio_of(first: Estimate, second: Estimate) -> Ratio:
    """Return first / second of two separate estimates above 0.

    The intervals are combined by the distance of each end from its value (MOVER).
    """
    repeats = min(first.repeats, second.repeats)
    value = first.value / second.value
    ends = (first.low, first.high, second.low, second.high)
    if not all(end is not None and end > 0 for end in ends):
        return Ratio(value, None, None, repeats)
    a_low, a_high, b_low, b_high = (
        abs(math.log(end / one.value))
        for end, one in zip(ends, (first, first, second, second), strict=True)
        if end is not None
    )
    low, high = math.hypot(a_low, b_high), math.hypot(a_high, b_low)
    return Ratio(value, value * math.exp(-low), value * math.exp(high), repeats)


def _positive(values: Sequence[float]) -> Estimate:
    """Return the median with the interval that is to be combined with another."""
    logs = _logs(values)
    interval = _interval(logs, _COMBINED_TAIL)
    low, high = map(math.exp, interval) if interval else (None, None)
    return Estimate(math.exp(median(logs)), low, high, len(logs))


def noise(values: Sequence[float]) -> float:
    """Return the relative standard deviation of repeats: 0.03 is 3 %; 0 for a single one.

    Raises:
        ValueError: a value is not above 0.
    """
    return stdev(_logs(values)) if len(values) > 1 else 0.0


def repeats_for(spread: float, within: float) -> int:
    """Return how many repeats give a median, or a paired ratio, ± `within`.

    Choose once, from a pilot's noise: stopping as soon as an interval looks narrow selects the
    intervals that are too narrow.

    Args:
        spread: the noise of the repeats, or of the ratios of pairs.
        within: half the interval's width, relative: 0.05 is ± 5 %.
    """
    reach = _MEDIAN_ERROR * NormalDist().inv_cdf(1 - _TAIL)
    wanted = math.ceil((reach * spread / math.log1p(within)) ** 2)
    return min(max(wanted, LEAST_REPEATS), MOST_REPEATS)


def _logs(values: Sequence[float]) -> list[float]:
    if not all(value > 0 for value in values):
        raise ValueError("a ratio needs values above 0")
    return [math.log(value) for value in values]


def _interval(values: Sequence[float], tail: float = _TAIL) -> tuple[float, float] | None:
    """Return the percentile interval of the smoothed bootstrap median, with a tail at each end.

    A resample draws values and adds normal noise, as wide as the error of their mean. The median of
    n draws from a distribution is below its p-quantile as often as a Beta variable is below p, so
    the interval's ends are two quantiles of that distribution.
    """
    count = len(values)
    if count < LEAST_REPEATS:
        return None
    width = stdev(values) / math.sqrt(count - 1)
    if width <= 1e-12 * max(map(abs, values)):  # alike but for rounding
        return min(values), max(values)
    kernel = NormalDist(0, width)
    reach = 8 * width
    span = min(values) - reach, max(values) + reach

    def below(at: float) -> float:
        return sum(kernel.cdf(at - value) for value in values) / count

    share = _median_tail(count, tail)
    return _solve(below, share, span), _solve(below, 1 - share, span)


@cache
def _median_tail(count: int, tail: float) -> float:
    """Return the tail's quantile of Beta(m, m), m = (count + 1) / 2.

    With an odd count that is exactly the middle of so many uniform values; with an even one, where
    the median lies between two of them, it is close.
    """
    power = (count + 1) / 2 - 1
    middles = [(step + 0.5) / _GRID for step in range(_GRID)]
    sums = list(accumulate((at * (1 - at)) ** power for at in middles))
    return next(at for at, total in zip(middles, sums, strict=True) if total >= tail * sums[-1])


def _solve(rising: Callable[[float], float], wanted: float, span: tuple[float, float]) -> float:
    """Return where a rising function reaches a value."""
    low, high = span
    for _ in range(40):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
