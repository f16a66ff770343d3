"""What a sweep's runs say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from deploy.benchmark.candidates import named, winning_spec
from deploy.benchmark.sweep import (
    Sweep,
    SweepRun,
    judge,
    judged,
    read_sweep,
    rounds_for,
    rows,
    write_sweep,
)
from deploy.benchmark.verdict import BenchVerdict
from deploy.errors import UsageError

NOISE = (1.0, 1.03, 0.98, 1.01, 0.99, 1.02)


def run(topology: str, number: int, rate: float | None, error: str | None = None) -> SweepRun:
    return SweepRun(
        topology=topology, round=number, folder=None, seconds=60, rate=rate, error=error
    )


def sweep(rates: Mapping[str, Sequence[float | None]], **changed: object) -> Sweep:
    fields = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["deploy", "bench", "sweep"],
        "key": "k",
        "unit": "GPU",
        "slo": "ttft=1s",
        "rounds": 5,
        "topologies": list(rates),
        "refused": {},
        "runs": [
            run(name, at, rate) for name, found in rates.items() for at, rate in enumerate(found)
        ],
        **changed,
    }
    return Sweep.model_validate(fields)


def times(rate: float, rounds: int = 5) -> list[float]:
    return [rate * noise for noise in NOISE[:rounds]]


def verdict(**rates: Sequence[float | None]) -> BenchVerdict:
    return judge(sweep({name.removeprefix("t"): found for name, found in rates.items()}))


def test_a_better_split_wins_with_margin_and_interval() -> None:
    found = verdict(t4a=times(10), t1p3d=times(14)[::-1], t2p2d=times(12))
    assert found.winner == "1p3d"
    assert found.sentence.startswith("1p3d holds 1.4")
    assert "the rate of 4a under ttft=1s" in found.sentence
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert found.ratio.low < 1.4 < (found.ratio.high or 0)


def test_a_worse_split_is_not_recommended() -> None:
    found = verdict(t4a=times(15), t1p3d=times(10)[::-1])
    assert found.sentence.startswith("Do not disaggregate this workload here: 4a holds 1.5")
    assert found.winner == "4a"


def test_a_difference_within_the_noise_is_not_significant() -> None:
    found = verdict(t4a=[10, 12, 9, 11, 10], t1p3d=[11, 10, 10, 12, 9])
    assert found.sentence.startswith("No significant difference between 1p3d and 4a in 5 rounds")
    assert found.winner == "4a", "the simpler one"


def test_a_margin_below_the_searchs_own_step_is_not_a_difference() -> None:
    found = verdict(t4a=[10.0] * 5, t1p3d=[10.8] * 5)
    assert found.sentence.startswith("No significant difference")


def test_too_few_rounds_have_no_verdict() -> None:
    found = verdict(t4a=times(10, 4), t1p3d=times(20, 4))
    assert found.sentence.startswith("Too few rounds to tell 1p3d from 4a: both ran 4 times")
    assert found.winner == "4a"


def test_stacks_of_other_sizes_are_compared_by_what_they_take() -> None:
    found = verdict(t2a=times(10), t1p2d=times(12)[::-1])
    assert "2a holds 1.2" in found.sentence
    assert "the rate per GPU of 1p2d" in found.sentence
    assert found.winner == "2a"


def test_redis_between_aggregated_engines_has_a_sentence() -> None:
    rates = {"4a": times(10), "4a+redis": times(13)[::-1], "1p3d": times(13)}
    found = judge(sweep(rates))
    assert found.baseline == "4a+redis"
    assert "4a+redis holds 1.3" in found.sentence
    assert found.sentence.startswith("No significant difference between 1p3d and 4a+redis")


def test_a_topology_without_a_rate_is_a_row_with_its_reason() -> None:
    held = sweep(
        {"4a": times(10), "1p3d": [12, None, 12, 12, 12], "2p2d": []}, refused={"1a:tp4": "no"}
    )
    failed = held.model_copy(
        update={"runs": [*held.runs, run("2p2d", 0, None, "producer-0 was not ready")]}
    )
    reasons = {row.topology: row.why_not for row in rows(failed)}
    assert reasons == {
        "4a": "",
        "1p3d": "no rate that was tried held the SLO in 1 of 5 rounds",
        "2p2d": "producer-0 was not ready",
        "1a:tp4": "no",
    }
    assert judge(failed).sentence.startswith("No verdict: no disaggregated topology has a rate")
    assert ("2p2d", 1) not in failed.left, "what failed once is not tried again"


def test_the_order_of_every_other_round_is_reversed() -> None:
    fresh = sweep({"4a": [], "1p3d": []}, rounds=2)
    assert fresh.left == [("4a", 0), ("1p3d", 0), ("1p3d", 1), ("4a", 1)]


def test_a_sweep_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = sweep({"4a": times(10), "1p3d": times(9)})
    one = judged(one)
    write_sweep(tmp_path, one)
    assert read_sweep(tmp_path) == one


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_broken_file_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UsageError, match="is not a sweep that this version"):
        read_sweep(tmp_path)


def test_the_winners_spec_is_what_was_asked_for_with_its_split() -> None:
    asked = {"vendor": "cuda", "gpus": 4, "layerwise": True, "redis": {"memory_gib": 2}, "tp": 4}
    split, plain = named("1p1d:tp2,4a")
    assert winning_spec(asked, split) == {
        "vendor": "cuda", "layerwise": True, "redis": {"memory_gib": 2},
        "topology": "1p1d", "tp": 2,
    }  # fmt: skip
    assert winning_spec(asked, plain) == {"vendor": "cuda", "topology": "4a"}


def test_rounds_are_enough_for_the_width_that_is_asked_for() -> None:
    noisy = [14.0, 15.5, 13.0, 14.5, 13.2]
    found = sweep({"4a": [10.0] * 5, "1p3d": noisy})
    assert rounds_for(found, 0.5) == 5
    assert rounds_for(found, 0.05) > rounds_for(found, 0.08) > 5
    one_failed = sweep({"4a": [10.0] * 5, "1p3d": [*noisy[:4], None]})
    assert rounds_for(one_failed, 0.01) == 5
    assert rounds_for(sweep({"4a": noisy}), 0.01) == 5
