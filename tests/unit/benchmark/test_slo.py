"""SLOs are read strictly, judged per request, and the search finds the rate that breaks them."""

from __future__ import annotations

import math
import random

import pytest

from deploy.benchmark.results import RequestRecord, Slo
from deploy.benchmark.slo import RateFinder, keeps, mean_itl_s, parse_slo, percentile, share_within
from deploy.errors import UsageError


def record(
    ttft_s: float | None = 0.1, itl_s: float = 0.01, *, tokens: int = 3, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        repeat=0, index=0, arrival_s=0.0, ttft_s=ttft_s, itl_s=[itl_s, itl_s], e2e_s=1.0,
        input_tokens=10, output_tokens=tokens, error=error,
    )  # fmt: skip


class TestParse:
    def test_keys_and_units_are_read(self) -> None:
        assert parse_slo("ttft=1s, itl=50ms,e2e=2.5s") == Slo(ttft_s=1, itl_s=0.05, e2e_s=2.5)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("tpot=1s", "unknown key 'tpot'; keys: ttft, itl, e2e"),
            ("ttft=1min", "unknown unit 'min' of ttft; units: s, ms"),
            ("ttft=1", "unknown unit '' of ttft"),
            ("ttft", "'ttft' is not KEY=NUMBER"),
            ("ttft=-1s", "'ttft=-1s' is not KEY=NUMBER"),
            ("ttft=0s", "ttft must be above 0"),
            ("ttft=1s,ttft=2s", "ttft is given twice"),
            ("", "'' is not KEY=NUMBER"),
        ],
    )
    def test_anything_else_is_one_clear_error(self, text: str, said: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_slo(text)
        assert said in caught.value.message
        assert "--slo" in caught.value.hint


class TestKeeps:
    def test_limits_are_inclusive(self) -> None:
        assert keeps(record(), Slo(ttft_s=0.1, itl_s=0.01, e2e_s=1.0))

    @pytest.mark.parametrize("slo", [Slo(ttft_s=0.09), Slo(itl_s=0.009), Slo(e2e_s=0.9)])
    def test_each_limit_counts(self, slo: Slo) -> None:
        assert not keeps(record(), slo)

    def test_a_failure_keeps_nothing(self) -> None:
        assert not keeps(record(error="HTTP 500"), Slo())
        assert not keeps(record(None), Slo())

    def test_itl_is_the_mean_over_tokens(self) -> None:
        """Two gaps of 10 ms between five tokens: some came together."""
        assert mean_itl_s(record(tokens=5)) == pytest.approx(0.005)
        assert mean_itl_s(record(tokens=1)) is None

    def test_share_is_of_all_requests(self) -> None:
        records = [record(), record(0.5), record(error="no"), record()]
        assert share_within(records, Slo(ttft_s=0.2)) == 0.5


def searched(finder: RateFinder, limit: float, count: int = 100) -> None:
    """Let all requests keep the SLO up to a rate, and half of them beyond."""
    while (rate := finder.next_rate()) is not None:
        good = count if rate <= limit else count // 2
        finder.add(rate, [record()] * good + [record(9)] * (count - good), Slo(ttft_s=1))


class TestRateFinder:
    @pytest.mark.parametrize("limit", [0.3, 1.0, 5.7, 40.0])
    def test_the_highest_rate_that_holds_is_found(self, limit: float) -> None:
        finder = RateFinder(1.0, 0.9, 12)
        searched(finder, limit)
        found = finder.found()
        assert found.highest_rate is not None
        assert limit / 1.1 <= found.highest_rate <= limit
        assert found.low is not None and found.high is not None
        assert found.low <= found.highest_rate <= limit < found.high

    @pytest.mark.parametrize(
        ("limit", "rates"),
        [(1e9, [1, 1.2, 1.728, 3.456, 6.912]), (0, [1, 1 / 1.2, 1 / 1.728, 1 / 3.456, 1 / 6.912])],
    )
    def test_steps_grow_with_each_rate(self, limit: float, rates: list[float]) -> None:
        finder = RateFinder(1.0, 0.9, 5)
        searched(finder, limit)
        assert [step.rate for step in finder.steps] == pytest.approx(rates)

    @pytest.mark.parametrize("limit", [1.0, 1.1, 1.19, 0.84, 0.99])
    def test_three_rates_are_enough_close_to_the_limit(self, limit: float) -> None:
        finder = RateFinder(1.0, 0.9, 12)
        searched(finder, limit)
        assert len(finder.steps) == 3
        assert limit / 1.1 <= (finder.found().highest_rate or 0) <= limit

    def test_many_steps_do_not_overflow(self) -> None:
        finder = RateFinder(1.0, 0.9, 40)
        searched(finder, 1e9)
        assert finder.found().highest_rate == pytest.approx(1e9, rel=0.1)

    def test_a_search_ends_after_its_number_of_steps(self) -> None:
        finder = RateFinder(1.0, 0.9, 3)
        searched(finder, 1e9)
        assert finder.found().highest_rate == pytest.approx(1.728)
        assert finder.found().high is None  # no rate failed: nobody knows how much higher it goes

    def test_no_rate_is_found_if_none_holds(self) -> None:
        finder = RateFinder(1.0, 0.9, 3)
        searched(finder, 0.0)
        assert finder.found().highest_rate is None

    def test_few_requests_give_a_wide_interval(self) -> None:
        widths = []
        for count in (10, 1000):
            finder = RateFinder(1.0, 0.9, 8)
            while (rate := finder.next_rate()) is not None:
                good = round(count * max(0.0, 1 - rate / 40))
                finder.add(rate, [record()] * good + [record(9)] * (count - good), Slo(ttft_s=1))
            found = finder.found()
            widths.append((found.high or 99.0) - (found.low or 0.0))
        assert widths[0] > widths[1]


@pytest.mark.full
@pytest.mark.parametrize("steepness", [3, 10, 40])
def test_the_interval_contains_the_limit_in_95_of_100_searches(steepness: int) -> None:
    """Requests keep the SLO by chance, the less likely the higher the rate; the limit is known.

    More than 95, because a rate between two that were tried is as likely as either.
    """
    chance, searches, contained = random.Random(steepness), 400, 0
    for _ in range(searches):
        limit = chance.uniform(3, 30)
        finder = RateFinder(limit * math.exp(chance.gauss(0, 0.3)), 0.9, 10)
        while (rate := finder.next_rate()) is not None:
            count = round(8 + 6 * rate)
            keep = 1 / (1 + (rate / limit) ** steepness / 9)  # 0.9 at the limit
            good = sum(chance.random() < keep for _ in range(count))
            finder.add(rate, [record()] * good + [record(9)] * (count - good), Slo(ttft_s=1))
        found = finder.found()
        contained += (found.low or 0) <= limit <= (found.high or math.inf)
    assert contained >= 0.93 * searches


def test_a_percentile_is_interpolated() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 90) == 9
    assert percentile([5], 99) == 5
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
