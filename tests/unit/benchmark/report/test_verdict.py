"""The verdict follows the numbers, and says when they do not suffice."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.benchmark.report.verdict import note, stack_names, verdict
from deploy.benchmark.results import Result
from tests.unit.benchmark.samples import repeat, result

RATES = (("2a", 2.0), ("1p1d", 3.0))
NOISE = (0.98, 1.01, 1.0, 0.99, 1.03, 1.02)


def run(topology: str, goodput: float, count: int = 6, **changed: Any) -> Result:
    """Return a run with six repeats around a goodput."""
    repeats = [repeat(at, goodput_per_s=goodput * one) for at, one in enumerate(NOISE[:count])]
    stack = result().stack.model_dump() | {
        "topology": topology,
        "engines": sum(int(one) for one in topology if one.isdigit()),
        "redis": not topology.endswith("a"),
    }
    return result(**{"repeats": repeats, "stack": stack, **changed})


class TestVerdict:
    def test_a_faster_split_is_recommended(self) -> None:
        found = verdict([run("4a", 2.0), run("1p3d", 2.8), run("2p2d", 2.4)])
        assert found.kind == "disaggregate"
        assert found.ratio is not None
        assert found.ratio.low is not None
        assert found.ratio.high is not None
        assert found.ratio.low < 1.4 < found.ratio.high
        assert found.sentence.startswith("1p3d holds 1.40 times (1.3")
        assert found.sentence.endswith("the rate of 4a within TTFT 1 s.")

    def test_a_slower_split_is_not_recommended(self) -> None:
        found = verdict([run("4a", 2.0), run("1p3d", 1.4), run("2p2d", 1.2)])
        assert found.kind == "do not"
        assert found.sentence.startswith("Do not disaggregate this workload here: 4a holds 1.43")
        assert found.winner == "4a"
        assert found.ratio is not None
        assert round(found.ratio.value, 2) == 0.7

    def test_equal_rates_are_no_significant_difference(self) -> None:
        found = verdict([run("4a", 2.0), run("1p3d", 2.01)])
        assert found.kind == "no difference"
        assert found.sentence.startswith(
            "No significant difference between 1p3d and 4a in 6 repeats: 1p3d holds"
        )

    def test_the_interval_alone_decides_on_a_small_margin(self) -> None:
        found = verdict([run("4a", 2.0), run("1p3d", 2.16)])
        assert found.kind == "disaggregate"
        assert found.sentence.startswith("1p3d holds 1.08 times (1.0")

    def test_too_few_repeats_have_no_verdict(self) -> None:
        found = verdict([run("2a", 2.0, count=3), run("1p1d", 4.0, count=3)])
        assert found.kind == "cannot tell"
        assert "both ran 3 times, and an interval needs 5" in found.sentence

    def test_stacks_of_unequal_size_are_compared_per_engine(self) -> None:
        found = verdict([run("2a", 2.0), run("1p2d", 2.1)])
        assert found.kind == "do not"
        assert "2a holds 1.43 times" in found.sentence
        assert "the rate per engine of 1p2d" in found.sentence

    def test_unlike_runs_have_no_verdict(self) -> None:
        found = verdict([run("2a", 2.0), run("1p1d", 4.0, seed=1)])
        assert (found.kind, found.sentence) == (
            "cannot tell",
            "No verdict: the runs differ (seed).",
        )

    def test_a_split_without_a_baseline_has_no_verdict(self) -> None:
        found = verdict([run("1p2d", 3.0), run("2p1d", 6.0)])
        assert found.kind == "cannot tell"
        assert "2p1d 2.01, 1p2d 1.01" in found.sentence

    @pytest.mark.parametrize(
        ("split", "baseline", "kind"),
        [(1.0, 0.0, "disaggregate"), (0.0, 1.0, "do not"), (0.0, 0.0, "cannot tell")],
    )
    def test_a_stack_that_answers_nothing_in_time_loses(
        self, split: float, baseline: float, kind: str
    ) -> None:
        found = verdict([run("1p1d", split), run("2a", baseline)])
        assert found.kind == kind
        assert found.sentence.startswith("Do not disaggregate") is (kind == "do not")

    def test_runs_of_the_same_stack_count_together(self) -> None:
        three = [run("2a", 2.0, count=3), run("1p1d", 3.0, count=3)]
        assert verdict(three).kind == "cannot tell"
        found = verdict([*three, *three])
        assert found.kind == "disaggregate"
        assert found.ratio is not None
        assert found.ratio.repeats == 6

    def test_a_single_run_has_no_comparison(self) -> None:
        found = verdict([run("1p1d", 2.0)])
        assert found.kind == "one run"
        assert found.sentence.startswith("1p1d holds 2.01 requests/s (1.9")
        assert "within TTFT 1 s: 1.00 for each of 2 engines. A verdict" in found.sentence
        on_gpus = result().stack.model_dump() | {"gpus": 8}
        assert "0.25 for each of 8 GPUs." in verdict([run("1p1d", 2.0, stack=on_gpus)]).sentence

    def test_the_searched_rate_decides(self) -> None:
        def searched(topology: str, rate: float) -> Result:
            search = {
                "required_share": 0.9, "highest_rate": rate, "low": 0.95 * rate,
                "high": 1.05 * rate, "steps": [],
            }  # fmt: skip
            return run(topology, 1.0, rate_search=search)

        two = [searched("2a", 2.0), searched("1p1d", 3.0)]
        found = verdict(two)
        assert found.kind == "disaggregate"
        assert "1.50 times" in found.sentence
        assert "for 90 % of requests" in found.sentence
        assert "too narrow" in note(two, found)
        fives = [searched(name, rate * one) for one in NOISE[:5] for name, rate in RATES]
        assert note(fives, verdict(fives)) == ""
        assert "1.50 times" in verdict(fives).sentence
        # The goodput of one beside the highest rate of the other would be no ratio.
        mixed = verdict([run("2a", 1.0), searched("1p1d", 3.0)])
        assert mixed.kind == "no difference"
        other = searched("1p1d", 3.0).model_dump()["rate_search"] | {"required_share": 0.5}
        unlike = verdict([searched("2a", 2.0), run("1p1d", 1.0, rate_search=other)])
        assert "required_share" in unlike.sentence


def test_runs_of_the_same_stack_have_names_of_their_own() -> None:
    assert stack_names([run("1p1d", 1), run("2a", 1), run("1p1d", 1)]) == [
        "1p1d #1",
        "2a",
        "1p1d #2",
    ]
