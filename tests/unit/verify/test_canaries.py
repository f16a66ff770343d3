"""What a canary says of the KV that an older computation left."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from deploy.document import as_document
from deploy.output.check_view import canaries_line
from deploy.verify.canaries import (
    EXPIRES_S,
    MOST,
    Canary,
    CanaryFindings,
    Look,
    Outcome,
    Present,
    ago,
    as_record,
    from_record,
    judged,
    kept,
)
from deploy.verify.equivalence import Completion

DAY = 86400.0
THEN = Completion(["token_id:1", "token_id:2"], [{"token_id:1": -0.1}, {"token_id:2": -0.2}], 8)
NOW = Completion(["token_id:5", "token_id:6"], [{"token_id:5": -0.1}, {"token_id:6": -0.2}], 8)
MIXED = Completion(["token_id:5", "token_id:6"], [{"token_id:5": -2.1}, {"token_id:6": -0.2}], 8)
CANARY = Canary(
    "canary-0123456789ab", 1000.0, "17", "model-1", "0.32.0", "0.5.6", "producer-0",
    [1, 2, 3, 4], THEN,
)  # fmt: skip


def look(
    fresh: Completion,
    answer: Completion,
    reused: tuple[int, int] = (4, 0),
    *,
    canary: Canary = CANARY,
    identity: str = "17",
) -> Look:
    present = Present(identity, CANARY.left_at + 3 * DAY, 0.25)
    return judged(canary, present, "consumer-0", fresh=fresh, answer=answer, reused=reused)


class TestJudged:
    @pytest.mark.parametrize(
        ("fresh", "answer", "outcome"),
        [
            (THEN, THEN, "same"),
            (NOW, NOW, "same"),
            (NOW, THEN, "outdated"),
            # Old KV with new weights gives neither answer.
            (NOW, MIXED, "outdated"),
            (THEN, MIXED, "damaged"),
        ],
    )
    def test_loaded_kv(self, fresh: Completion, answer: Completion, outcome: Outcome) -> None:
        found = look(fresh, answer)
        assert found.outcome == outcome
        assert found.wrong == (outcome != "same")
        assert found.age_s == 3 * DAY

    def test_nothing_found_is_no_failure(self) -> None:
        assert look(THEN, THEN, (0, 0)).outcome == "evicted"
        assert look(NOW, NOW, (0, 0), identity="18").outcome == "other"
        assert not look(NOW, NOW, (0, 0), identity="18").wrong

    def test_kv_of_another_identity_must_not_be_found(self) -> None:
        assert look(NOW, NOW, identity="18").outcome == "foreign", "whatever it answers"

    def test_kv_that_was_stored_anew_under_the_present_identity_may_be_found(self) -> None:
        again = replace(CANARY, looked_under=["18"])
        assert look(NOW, NOW, canary=again, identity="18").outcome == "same"
        assert look(NOW, THEN, canary=again, identity="18").outcome == "outdated"

    def test_what_a_consumer_holds_is_compared(self) -> None:
        assert look(THEN, THEN, (0, 4)).outcome == "same"
        assert look(NOW, THEN, (0, 4)).outcome == "outdated"

    def test_noise_within_the_tolerance_is_none(self) -> None:
        near = replace(THEN, top_logprobs=[{"token_id:1": -0.3}, {"token_id:2": -0.2}])
        assert look(THEN, near).outcome == "same"


def canaries(*looks: Look, known: int = 2) -> CanaryFindings:
    return CanaryFindings(known, looks, tolerance=0.25)


class TestSaid:
    def test_a_failure_names_consumer_age_difference_and_kind(self) -> None:
        (failure,) = canaries(look(NOW, MIXED)).failures()
        assert failure.item == "canaries"
        assert failure.sentence == (
            "consumer-0 answers from stale KV: a check stored it 3 days ago, and its answer and a "
            "fresh computation's differ by 2.00 (0.25 is tolerated); engines now compute "
            "another answer: KV of an older model or version"
        )

    def test_damage_and_foreign_kv_are_told_apart(self) -> None:
        (damaged,) = canaries(look(THEN, MIXED)).failures()
        assert "have no token in common" in damaged.sentence
        assert damaged.sentence.endswith("the stored KV was damaged")
        (foreign,) = canaries(look(NOW, NOW, identity="18")).failures()
        assert "loaded 4 tokens" in foreign.sentence and "another identity" in foreign.sentence

    def test_one_failure_a_consumer_with_its_worst(self) -> None:
        worse = replace(look(NOW, MIXED), tag="canary-b", max_logprob_diff=7.0)
        other = replace(worse, consumer="consumer-1")
        first, second = canaries(look(NOW, MIXED), worse, other).failures()
        assert "(and from 1 more)" in first.sentence and "differ by 7.00" in first.sentence
        assert second.sentence.startswith("consumer-1 ")

    def test_the_cause_has_the_age(self) -> None:
        assert canaries(look(THEN, THEN)).cause == ""
        assert canaries(look(NOW, MIXED)).cause == (
            "the store has KV of another model, version or settings, stored 3 days ago"
        )
        assert canaries(look(THEN, MIXED)).cause == "the store has damaged KV, stored 3 days ago"

    def test_a_line_for_people(self) -> None:
        same, gone = look(THEN, THEN), replace(look(THEN, THEN, (0, 0)), tag="canary-b")
        assert canaries_line(canaries(known=0)) == "Canaries: no KV of an earlier check"
        assert canaries_line(canaries(same)) == "Canaries: 1, of 3 days ago: same answers"
        assert canaries_line(canaries(same, gone)) == (
            "Canaries: 1, of 3 days ago: same answers; 1 of 2 evicted"
        )
        two = canaries(same, replace(look(NOW, MIXED), tag="canary-c"))
        assert canaries_line(two) == ("Canaries: 2, the oldest of 3 days ago: 1 answered otherwise")

    def test_json_has_no_infinity(self) -> None:
        found = canaries(look(THEN, MIXED))
        assert math.isinf(found.looks[0].max_logprob_diff or 0)
        data = json.loads(json.dumps(as_document(found), allow_nan=False))
        assert data["looks"][0]["max_logprob_diff"] is None
        assert (data["same"], data["evicted"]) == (0, 0)

    @pytest.mark.parametrize(
        ("seconds", "said"),
        [(0.4, "just now"), (1, "1 second ago"), (7300, "2 hours ago"), (86400, "1 day ago")],
    )
    def test_ages(self, seconds: float, said: str) -> None:
        assert ago(seconds) == said


class TestRecord:
    def test_a_record_is_read_as_it_was_written(self) -> None:
        raw = json.loads(json.dumps(as_record([replace(CANARY, looked_under=["18"])])))
        (found,), damaged = from_record(raw)
        assert damaged == 0
        assert found == replace(CANARY, looked_under=["18"], answer=replace(THEN, prompt_tokens=4))

    @pytest.mark.parametrize(
        "change",
        [
            {"tag": ""},  # would remove the keys of every check
            {"tag": "canary-*"},
            {"tag": 3},
            {"left_at": math.nan},
            {"left_at": True},
            {"prompt": []},
            {"prompt": [1, -2]},
            {"prompt": ["1"]},
            {"prompt": [True]},
            {"prompt": None},
            {"tokens": ["token_id:1"]},
            {"top_logprobs": [{"token_id:1": math.inf}, {"token_id:2": -0.2}]},
            {"top_logprobs": [{}, {"token_id:2": -0.2}]},
            {"top_logprobs": [3, 4]},
            {"identity": None},
            {"looked_under": [1]},
        ],
    )
    def test_a_damaged_canary_is_left_out(self, change: dict[str, Any]) -> None:
        raw = as_record([CANARY, replace(CANARY, tag="canary-ffffffffffff")])
        raw["canaries"][0].update(change)
        (found,), damaged = from_record(raw)
        assert (found.tag, damaged) == ("canary-ffffffffffff", 1)

    @pytest.mark.parametrize("raw", [None, [], {}, {"format": 1, "canaries": []}, {"format": 2}, 3])
    def test_what_is_no_record_is_refused(self, raw: Any) -> None:
        with pytest.raises(ValueError, match="not a record"):
            from_record(raw)

    @pytest.mark.parametrize("raw", [{}, None, 3, "x", [1]])
    def test_what_is_no_canary_is_left_out(self, raw: Any) -> None:
        assert from_record({"format": 2, "canaries": [raw]}) == ([], 1)


def test_the_oldest_and_the_newest_are_kept() -> None:
    every = [replace(CANARY, tag=f"canary-{n:012x}", left_at=float(n)) for n in range(MOST + 2)]
    stay, over = kept(every[::-1])
    assert [one.left_at for one in stay] == [0.0, 3.0, 4.0, 5.0]
    assert [one.left_at for one in over] == [1.0, 2.0]
    assert kept(every[:2]) == (every[:2], [])


def test_a_canary_expires() -> None:
    assert not CANARY.is_expired(CANARY.left_at + EXPIRES_S)
    assert CANARY.is_expired(CANARY.left_at + EXPIRES_S + 1)
    assert CANARY.is_expired(CANARY.left_at - 2 * DAY), "of a clock that was wrong"
