"""What of a check's findings is a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.verify.equivalence import LOGPROB_TOLERANCE, MOST_NOISE, Completion
from deploy.verify.findings import Findings, failures
from deploy.verify.hits import Counted, Hits, PairResult, Phase


def sound() -> Findings:
    return Findings(
        pairs=[PairResult("p", "c", Hits(1000, 800, 800))],
        race=Phase(Hits(500, 400, 400), 2),
        turns=Phase(Hits(900, 700, 700), 3),
        burst=Phase(Hits(9000, 7000, 7000), 16),
        compared=4,
        stored_keys=5,
        counted=Counted(1000, 800),
    )


def failed(found: Findings, least: float = 1.0) -> list[str]:
    return [item for item, _ in failures(found, (), store_answers=True, least=least)]


def test_a_healthy_stack_has_no_cause() -> None:
    assert failed(sound()) == []
    assert not sound().missed


@pytest.mark.parametrize("hits", [799, 801, 0])
def test_a_pair_that_loaded_something_else(hits: int) -> None:
    found = sound()
    found.pairs = [PairResult("p", "c", Hits(1000, hits, 800))]
    found.counted = Counted(1000, hits)
    assert failed(found) == ["p → c"]
    assert found.missed


@pytest.mark.parametrize(("least", "passes"), [(0.9, True), (0.99, True), (0.999, False)])
def test_a_lower_rate_can_be_asked_for(least: float, passes: bool) -> None:
    found = sound()
    found.pairs = [PairResult("p", "c", Hits(1000, 794, 800))]
    found.race = Phase(Hits(500, 397, 400), 2)
    found.counted = Counted(1000, 794)
    assert (failed(found, least) == []) is passes


def test_more_than_is_eligible_is_never_good_enough() -> None:
    found = sound()
    found.pairs = [PairResult("p", "c", Hits(1000, 900, 800))]
    found.counted = Counted(1000, 900)
    assert failed(found, least=0.5) == ["p → c"]


@pytest.mark.parametrize(
    ("field", "item"),
    [("race", "router, no gap"), ("turns", "several turns"), ("decode_reuse", "decode reuse")],
)
def test_counters_are_not_judged_if_others_used_the_stack(field: str, item: str) -> None:
    phase, found = Phase(Hits(500, 300, 400), 2), sound()
    setattr(found, field, phase)
    assert failed(found) == [item]
    assert found.missed
    setattr(found, field, replace(phase, blurred=True))
    assert failed(found) == []
    assert not found.missed


@pytest.mark.parametrize(
    ("field", "item"),
    [("race", "router, no gap"), ("turns", "several turns"), ("burst", "burst")],
)
def test_more_than_is_eligible_was_counted_wrongly(field: str, item: str) -> None:
    phase, found = Phase(Hits(1109, 3072, 1024), 2), sound()
    setattr(found, field, phase)
    assert failed(found) == failed(found, least=0.5) == [item]
    setattr(found, field, replace(phase, blurred=True))
    assert failed(found) == []


def test_a_phase_that_was_left_out_is_not_a_failure() -> None:
    found = sound()
    found.turns = Phase(skipped="the context is too short")
    assert failed(found) == []


def test_requests_of_a_burst_that_failed() -> None:
    found = sound()
    found.burst = Phase(Hits(9000, 7000, 7000), 16, failed=1)
    assert failed(found) == ["burst"]


def test_hits_of_a_burst_are_shown_and_not_judged() -> None:
    found = sound()
    found.burst = Phase(Hits(9000, 10, 7000), 16)
    assert failed(found) == []


def test_vllms_own_counters_must_agree_with_its_answers() -> None:
    found = sound()
    found.counted = Counted(1000, 512)
    assert failed(found) == ["equivalence"]
    found.counted = Counted(1000, 512, others=3)
    assert failed(found) == [], "others' hits are among it"


def answer(shift: float = 0.0, cached: int = 0) -> Completion:
    return Completion(("a",), ({"a": -0.5 - shift, "b": -3.0 + shift},), 600, cached)


def noisy(shift: float) -> Findings:
    found = sound()
    found.add_noise("p", answer(), answer(shift, cached=512))
    found.add_noise("c", answer(), answer(shift, cached=512))
    return found


@pytest.mark.parametrize(("noise", "passes"), [(0.0, False), (0.05, True)])
def test_a_difference_is_judged_against_the_noise(noise: float, passes: bool) -> None:
    found = noisy(noise)
    found.add_comparison(answer(), answer(0.3))
    assert (failed(found) == []) is passes
    assert found.equivalence.noise_floor == pytest.approx(noise)


@pytest.mark.parametrize(("shift", "passes"), [(0.45, True), (2.9, False)])
def test_an_answer_of_a_batch_may_differ_twice_as_far(shift: float, passes: bool) -> None:
    found = noisy(0.0)
    found.add_comparison(answer(), answer(shift), batched=True)
    assert (failed(found) == []) is passes
    found.add_comparison(answer(), answer(shift))
    assert failed(found) == ["equivalence"]


def test_ruin_is_noticed_however_noisy_the_engines_are() -> None:
    found = noisy(MOST_NOISE - 0.01)
    found.add_comparison(answer(), answer(2.9))
    assert failed(found) == ["equivalence"]


def test_an_engine_that_contradicts_itself_fails_and_does_not_raise_the_tolerance() -> None:
    found = sound()
    found.add_noise("p", answer(), answer(0.1, cached=512))
    found.add_noise("c", answer(), answer(5.0, cached=512))
    ((item, sentence),) = failures(found, (), store_answers=True)
    assert item == "equivalence"
    assert "c contradicts itself" in sentence and "5.00" in sentence
    found.add_comparison(answer(), answer(2.9))
    assert found.mismatched == 1


@pytest.mark.parametrize(("first", "second"), [(0, 0), (512, 512)])
def test_answers_that_are_not_one_computed_and_one_cached_tell_no_noise(
    first: int, second: int
) -> None:
    """Without a prefix cache both are computed: that they agree tells nothing."""
    found = sound()
    found.add_noise("p", answer(cached=first), answer(0.2, cached=second))
    assert found.equivalence.noise_floor is None
    assert found.equivalence.tolerance == LOGPROB_TOLERANCE


def test_a_restarted_engine_fails_the_check() -> None:
    found = sound()
    found.restarted = ["consumer-0"]
    assert failed(found) == ["engines"]


def test_a_context_without_room_for_a_chunk() -> None:
    found = Findings(too_short="the context is too short")
    assert failed(found) == ["prompts"]
