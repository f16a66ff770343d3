"""The shape of a check's finding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deploy.verify.hits import Hits, PairResult, Phase
from deploy.verify.items import Failure
from deploy.verify.report import CheckReport, Diagnosis, EngineHealth, Equivalence, StoreUse

REPORT = CheckReport(
    pairs=(
        PairResult("producer-0", "consumer-0", Hits(1000, 600, 800)),
        PairResult("producer-0", "consumer-1", Hits(1000, 800, 800)),
    ),
    race=Phase(Hits(500, 100, 400), 2),
    equivalence=Equivalence(6, 1, 0.12345678),
    store=StoreUse(1, 9, 1 << 20, 1 << 30, 0, 8),
    path=None,
    engines=(EngineHealth("producer-0", "producer", True, 2),),
    failed=(
        Failure("producer-0 → consumer-0", "producer-0 → consumer-0: 600 of 800 eligible tokens"),
    ),
    diagnosis=(Diagnosis("keys_lost", "Redis was flushed", "deploy check"),),
    seconds=1.2345,
)

# DESIGN.md, `deploy check --json` → data. Scripts rely on these words.
CONTRACT: dict[str, Any] = {
    "passed": None,
    "hit_rate": {"queries", "hits", "rate", "eligible", "eligible_rate"},
    "pairs": {"producer", "consumer", "eligible", "hits", "eligible_rate", "tiers"},
    "store_race": {"gap_s", "eligible", "hits", "eligible_rate", "blurred"},
    "equivalence": {
        "compared",
        "mismatched",
        "max_logprob_diff",
        "noise_floor",
        "tolerance",
    },
    "redis": {
        "keys_before",
        "keys_after",
        "used_memory_bytes",
        "max_memory_bytes",
        "evicted_keys",
        "keys_removed",
    },
    "store_path": None,
    "engines": {"name", "role", "healthy", "restarts"},
    "diagnosis": {"code", "message", "hint"},
}
EXTRAS = {
    "failures", "seconds", "turns", "decode_reuse", "burst", "counted", "others_requests", "vllm",
    "prompts", "left_out", "second_tier", "canaries",
}  # fmt: skip


class TestContract:
    def test_top_level_keys(self) -> None:
        assert set(REPORT.as_dict()) == set(CONTRACT) | EXTRAS

    @pytest.mark.parametrize("part", [part for part, keys in CONTRACT.items() if keys])
    def test_keys_of_each_part(self, part: str) -> None:
        found = REPORT.as_dict()[part]
        for each in found if isinstance(found, list) else [found]:
            assert set(each) == CONTRACT[part]

    def test_the_report_has_the_numbers_of_the_contract(self) -> None:
        data = REPORT.as_dict()
        assert data["passed"] is False
        assert data["hit_rate"] == {
            "queries": 2000, "hits": 1400, "rate": 0.7, "eligible": 1600, "eligible_rate": 0.875,
        }  # fmt: skip
        assert [pair["eligible_rate"] for pair in data["pairs"]] == [0.75, 1.0]
        assert data["store_race"]["gap_s"] == 0
        assert data["store_race"]["eligible_rate"] == 0.25
        assert data["engines"][0]["restarts"] == 2

    def test_infinite_numbers_are_null_in_json(self) -> None:
        endless = replace(REPORT, equivalence=Equivalence(1, 1, float("inf")))
        text = json.dumps(endless.as_dict(), allow_nan=False)
        assert json.loads(text)["equivalence"]["max_logprob_diff"] is None

    def test_noise_floor_and_what_it_tolerates(self) -> None:
        noisy = replace(REPORT, equivalence=Equivalence(6, 0, 0.5, 0.1234567, 0.9))
        told = noisy.as_dict()["equivalence"]
        assert (told["noise_floor"], told["tolerance"]) == (0.123457, 0.9)
        told = REPORT.as_dict()["equivalence"]
        assert (told["noise_floor"], told["tolerance"]) == (None, 0.25), "not measured"
        endless = replace(REPORT, equivalence=Equivalence(6, 0, 0.5, float("inf"), 2.8))
        assert json.loads(json.dumps(endless.as_dict()))["equivalence"]["noise_floor"] is None

    def test_rates_that_are_not_whole_are_never_one(self) -> None:
        almost = PairResult("p", "c", Hits(10**6, 10**6 - 1, 10**6))
        data = replace(REPORT, pairs=(almost,)).as_dict()
        assert data["pairs"][0]["eligible_rate"] < 1
        assert data["hit_rate"]["eligible_rate"] < 1


class TestVerdict:
    def test_passes_without_failures_only(self) -> None:
        assert not REPORT.passed
        assert replace(REPORT, failed=()).passed

    @pytest.mark.parametrize(
        ("hits", "eligible", "complete"),
        [(800, 800, True), (799, 800, False), (801, 800, False), (0, 0, False), (0, 800, False)],
    )
    def test_a_pair_is_complete_when_exactly_the_eligible_was_hit(
        self, hits: int, eligible: int, complete: bool
    ) -> None:
        assert PairResult("p", "c", Hits(1000, hits, eligible)).complete is complete


class TestHits:
    def test_hits_are_summed(self) -> None:
        assert Hits(1, 2, 3) + Hits(10, 20, 30) == Hits(11, 22, 33)
        assert REPORT.total == Hits(2000, 1400, 1600)

    def test_rates_of_nothing_are_zero(self) -> None:
        assert (Hits().rate, Hits().eligible_rate) == (0.0, 0.0)
        assert replace(REPORT, pairs=()).total == Hits()
