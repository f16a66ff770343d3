"""Two runs side by side: like runs only, the right direction, and certainty that is there."""

from __future__ import annotations

import pytest

from deploy.benchmark.compare import Comparison, MetricRow, compare
from deploy.benchmark.results import Result
from deploy.errors import UsageError
from deploy.output.bench_view import compare_view
from tests.unit.benchmark.samples import repeat, result

NOISE = (0.98, 1.01, 1.0, 0.99, 1.03, 1.02)


def run(factor: float = 1.0, rate: float = 2.0, count: int = 6, **changed: object) -> Result:
    """Return a run whose TTFT is 0.1 s times a factor, with noise."""
    repeats = []
    for index, one in enumerate(NOISE[:count]):
        value = 0.1 * factor * one
        latency = {"p50": value, "p90": 2 * value, "p99": 3 * value, "mean": value}
        repeats.append(repeat(index, rate=rate, ttft_s=latency))
    return result(**{"repeats": repeats, **changed})


def ttft(comparison: Comparison) -> MetricRow:
    rows = comparison.points[0].metrics
    return next(row for row in rows if row.metric == "TTFT p50")


class TestWhatIsCompared:
    def test_a_slower_run_is_worse_by_its_factor(self) -> None:
        row = ttft(compare(run(), run(1.5)))
        assert row.verdict == "worse"
        assert row.ratio is not None
        assert row.ratio.low is not None
        assert row.ratio.high is not None
        assert row.ratio.low < 1.5 < row.ratio.high

    def test_a_higher_rate_is_better(self) -> None:
        faster = result(repeats=[repeat(index, goodput_per_s=3.0) for index in range(5)])
        slower = result(repeats=[repeat(index) for index in range(5)])
        rows = compare(slower, faster).points[0].metrics
        assert {row.metric: row.verdict for row in rows}["goodput"] == "better"

    def test_like_runs_do_not_differ(self) -> None:
        assert ttft(compare(run(), run(1.005))).verdict == "no significant difference"

    def test_few_repeats_have_no_verdict(self) -> None:
        assert ttft(compare(run(count=4), run(2.0, count=4))).verdict == "too few repeats"

    def test_a_goodput_of_zero_has_no_ratio(self) -> None:
        nothing = result(repeats=[repeat(index, goodput_per_s=0.0) for index in range(5)])
        rows = compare(nothing, run()).points[0].metrics
        assert next(row for row in rows if row.metric == "goodput").ratio is None

    def test_an_error_names_a_few_of_many_loads(self) -> None:
        searched = result(repeats=[repeat(at, rate=10.0 + at) for at in range(9)])
        with pytest.raises(UsageError, match=r": 10 .*, 12 \S+ offered and 6 more; and 2 "):
            compare(searched, run())

    def test_only_common_loads_are_compared(self) -> None:
        both = run().repeats
        more = [*both, *run(rate=4.0).repeats]
        assert [one.load for one in compare(result(repeats=more), run()).points] == [
            "2 requests/s offered"
        ]
        with pytest.raises(UsageError, match=r"no load in common: 2 .* 4 ") as found:
            compare(run(), run(rate=4.0))
        assert "--rate" in found.value.hint


class TestUnlikeRuns:
    def test_unlike_runs_are_refused_with_the_field_and_both_values(self) -> None:
        other = run(seed=7)
        with pytest.raises(UsageError, match="seed") as found:
            compare(run(), other)
        assert found.value.details == ("seed: 0 and 7",)
        assert "--anyway" in found.value.hint

    @pytest.mark.parametrize(
        ("part", "field", "value"),
        [
            ("model", "dtype", "float16"),
            ("workload", "input_tokens", 2000),
            ("machine", "processor", "another"),
            ("versions", "vllm", "0.33.0"),
            ("slo", "ttft_s", 2.0),
        ],
    )
    def test_a_difference_in_each_part_is_refused(
        self, part: str, field: str, value: object
    ) -> None:
        changed = run().model_dump()[part] | {field: value}
        with pytest.raises(UsageError, match=f"{part}.{field}"):
            compare(run(), run(**{part: changed}))

    def test_how_busy_the_machine_was_and_the_stack_may_differ(self) -> None:
        busy = run().model_dump()["machine"] | {"load_1m": 3.0}
        stack = run().model_dump()["stack"] | {"topology": "1p2d", "engines": 3}
        found = compare(run(), run(machine=busy, stack=stack))
        assert not found.unlike
        assert any("A 2 and B 3" in note for note in found.notes)
        (rows,) = [one.metrics for one in found.points]
        ratios = {row.metric: row.ratio.value for row in rows if row.ratio}
        assert ratios["requests"] == 1.0
        assert ratios["requests per engine"] == pytest.approx(2 / 3)
        assert "TTFT p50 per engine" not in ratios

    def test_rates_of_equal_stacks_are_not_divided(self) -> None:
        (rows,) = [one.metrics for one in compare(run(), run()).points]
        assert not [row.metric for row in rows if " per " in row.metric]

    def test_more_gpus_of_the_same_kind_are_no_other_machine(self) -> None:
        machine = run().model_dump()["machine"]
        two, three = (run(machine=machine | {"gpus": ["a GPU"] * count}) for count in (2, 3))
        assert not compare(two, three).unlike
        with pytest.raises(UsageError, match=r"machine.gpus"):
            compare(two, run(machine=machine | {"gpus": ["another"] * 2}))

    def test_stacks_without_redis_need_no_equal_redis(self) -> None:
        versions = run().model_dump()["versions"] | {"redis": None, "lmcache": None}
        stack = run().model_dump()["stack"] | {"topology": "2a", "redis": False}
        assert not compare(run(), run(versions=versions, stack=stack)).unlike
        with pytest.raises(UsageError, match=r"versions.lmcache, versions.redis"):
            compare(run(), run(versions=versions))

    def test_anyway_compares_and_names_the_difference(self) -> None:
        found = compare(run(), run(seed=7), anyway=True)
        assert [one.field for one in found.unlike] == ["seed"]
        assert "differs: seed: 0 and 7" in compare_view(found, run(), run(seed=7))


def test_failures_and_interruptions_are_named() -> None:
    broken = result(repeats=[repeat(failed=3, completed=17)], interrupted=True)
    notes = "\n".join(compare(run(), broken).notes)
    assert "B: 3 of 20 requests failed" in notes
    assert "B: interrupted" in notes


def test_view_has_ratio_interval_and_verdict() -> None:
    first, second = run(), run(1.5)
    text = compare_view(compare(first, second), first, second)
    line = next(line for line in text.splitlines() if line.startswith("TTFT p50"))
    assert line.split()[:6] == ["TTFT", "p50", "100.5", "ms", "150.8", "ms"]
    assert "1.50" in line
    assert line.endswith("worse")
