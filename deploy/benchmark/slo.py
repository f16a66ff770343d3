"""Service-level objectives: what a request must keep, and the highest rate at which enough do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deploy.benchmark.results import RateSearch, RateStep, RequestRecord, Slo
from deploy.errors import UsageError

_LIMIT = re.compile(r"(?P<key>[a-z0-9]+)=(?P<number>\d+(?:\.\d+)?)(?P<unit>[a-zµ]*)")
_UNITS_S = {"s": 1.0, "ms": 1e-3}
_EXAMPLE = "--slo ttft=1s,itl=50ms"
# Neighbouring rates that differ by less are one.
RESOLUTION = 1.1
# From rate to rate, until one holds and one fails. One more rate resolves the first of these.
_STRIDES = (1.2, 1.44, 2.0)
_TAIL = 0.025


def parse_slo(text: str) -> Slo:
    """Return the limits of a text such as `ttft=1s,itl=50ms`.

    Raises:
        UsageError: an unknown key or unit, a number that is not above zero, or a key twice.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = _LIMIT.fullmatch(part.strip())
        if found is None:
            raise _refused(text, f"'{part.strip()}' is not KEY=NUMBER and a unit")
        key, unit = found["key"], found["unit"]
        if f"{key}_s" not in Slo.model_fields:
            raise _refused(text, f"unknown key '{key}'; keys: ttft, itl, e2e")
        if unit not in _UNITS_S:
            raise _refused(text, f"unknown unit '{unit}' of {key}; units: s, ms")
        if f"{key}_s" in limits:
            raise _refused(text, f"{key} is given twice")
        limits[f"{key}_s"] = float(found["number"]) * _UNITS_S[unit]
        if not limits[f"{key}_s"]:
            raise _refused(text, f"{key} must be above 0")
    return Slo(**limits)


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"--slo {text}: {why}", hint=f"deploy bench {_EXAMPLE}")


def mean_itl_s(record: RequestRecord) -> float | None:
    """Return the mean time between a request's tokens; several may arrive together."""
    if record.ttft_s is None or record.output_tokens < 2:
        return None
    return sum(record.itl_s) / (record.output_tokens - 1)


def keeps(record: RequestRecord, slo: Slo) -> bool:
    """Tell whether a request was answered within all limits."""
    if record.error is not None or record.ttft_s is None:
        return False
    pairs = (
        (record.ttft_s, slo.ttft_s),
        (mean_itl_s(record), slo.itl_s),
        (record.e2e_s, slo.e2e_s),
    )
    return all(limit is None or took is None or took <= limit for took, limit in pairs)


def share_within(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Return the share of requests within the SLO; one that failed is not."""
    return sum(keeps(record, slo) for record in records) / len(records) if records else 0.0


@dataclass
class RateFinder:
    """Chooses the rates to try: growing strides until one holds and one fails, then bisection.

    The first stride is small, because mostly the first rate is close to the one that is searched.

    Attributes:
        start: the first rate, in requests per second.
        share: of requests that must keep the SLO for a rate to hold it.
        most_steps: after as many rates the search ends.
    """

    start: float
    share: float
    most_steps: int
    steps: list[RateStep] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def next_rate(self) -> float | None:
        """Return the rate to try next; None when the search is over."""
        if len(self.steps) >= self.most_steps:
            return None
        if not self.steps:
            return self.start
        failed, held = self._lowest_failed, self._highest_held
        stride = _STRIDES[min(len(self.steps), len(_STRIDES)) - 1]
        if failed is None:
            return (held or self.start) * stride
        if held is None:
            return failed / stride
        return None if failed / held <= RESOLUTION else math.sqrt(held * failed)

    def add(self, rate: float, records: Sequence[RequestRecord], slo: Slo) -> RateStep:
        """Note what a rate gave."""
        share = share_within(records, slo)
        step = RateStep(rate=rate, within_slo=share, held=share >= self.share)
        self.steps.append(step)
        self._counts.append(len(records))
        return step

    def found(self) -> RateSearch:
        """Return the result; requests count as independent of each other."""
        low, high = self._interval()
        return RateSearch(
            required_share=self.share,
            highest_rate=self._highest_held,
            low=low,
            high=high,
            steps=self.steps,
        )

    @property
    def _lowest_failed(self) -> float | None:
        return min((step.rate for step in self.steps if not step.held), default=None)

    @property
    def _highest_held(self) -> float | None:
        failed = self._lowest_failed or math.inf
        held = (step.rate for step in self.steps if step.held and step.rate < failed)
        return max(held, default=None)

    def _interval(self) -> tuple[float | None, float | None]:
        """Return the rates that all hold, and that do not, with 97.5 % certainty each.

        The limit lies between two rates that were tried, so this holds it in at least 95 of 100
        searches. None is a bound that no rate tried shows.
        """
        low, high, all_hold = None, None, 1.0
        for step, count in sorted(
            zip(self.steps, self._counts, strict=True), key=lambda pair: pair[0].rate
        ):
            all_hold *= _chance_to_hold(count, step.within_slo, self.share)
            if all_hold >= 1 - _TAIL:
                low = step.rate
            if all_hold <= _TAIL and high is None:
                high = step.rate
        return low, high


def _chance_to_hold(count: int, seen: float, share: float) -> float:
    """Return the probability that `share` of the requests keep the SLO, at the observed rate."""
    if seen in {0.0, 1.0}:
        return seen
    return sum(
        math.exp(
            math.lgamma(count + 1) - math.lgamma(kept + 1) - math.lgamma(count - kept + 1)
            + kept * math.log(seen) + (count - kept) * math.log1p(-seen)
        )
        for kept in range(count + 1)
        if kept / count >= share
    )  # fmt: skip


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile by linear interpolation.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
