"""Whether two answers are the same answer."""

from __future__ import annotations

import math

import pytest

from deploy.verify.equivalence import (
    LOGPROB_TOLERANCE,
    MOST_NOISE,
    Completion,
    Noise,
    compare,
    self_differences,
)

INF, NAN = math.inf, math.nan


def answer(*steps: dict[str, float], tokens: str | None = None) -> Completion:
    """Return an answer that took each step's likeliest token, or the given ones."""
    taken = tokens or "".join(max(step, key=step.__getitem__) for step in steps)
    return Completion(tuple(taken), steps, 8)


SURE = {"a": -0.1, "b": -3.0}
TORN = {"a": -0.69, "b": -0.70}


def test_equal_answers_match() -> None:
    same = compare(answer(SURE, SURE), answer(SURE, SURE))
    assert (same.matches, same.max_logprob_diff) == (True, 0.0)


@pytest.mark.parametrize(("shift", "matches"), [(0.2, True), (0.25, True), (0.3, False)])
def test_answers_within_the_tolerance_match(shift: float, matches: bool) -> None:
    moved = {token: value - shift for token, value in SURE.items()}
    result = compare(answer(SURE, SURE), answer(SURE, moved), tolerance=0.25 + 1e-9)
    assert result.matches is matches
    assert result.max_logprob_diff == pytest.approx(shift)


def test_the_difference_of_any_step_counts() -> None:
    moved = {"a": -0.1, "b": -9.0}
    for steps in ((moved, SURE, SURE), (SURE, moved, SURE), (SURE, SURE, moved)):
        assert not compare(answer(SURE, SURE, SURE), answer(*steps)).matches


def test_a_tolerance_of_ones_own() -> None:
    moved = {"a": -0.2, "b": -3.0}
    assert compare(answer(SURE), answer(moved), tolerance=0.2).matches
    assert not compare(answer(SURE), answer(moved), tolerance=0.05).matches


def test_parting_where_the_reference_was_undecided() -> None:
    other = {"a": -0.70, "b": -0.69}
    result = compare(answer(SURE, TORN, SURE), answer(SURE, other, {"z": -0.1}))
    assert result.matches, "what follows is another text and is not compared"
    assert result.max_logprob_diff == pytest.approx(0.01)


def test_parting_where_the_reference_was_decided() -> None:
    assert not compare(answer(SURE, SURE), answer(SURE, {"b": -0.1, "a": -3.0})).matches


def test_parting_to_a_token_that_was_not_in_question() -> None:
    """The reference was torn between a and b; c was never one of them."""
    torn = {"a": -0.9, "b": -1.0, "c": -6.0}
    result = compare(answer(torn), answer({"a": -0.9, "b": -1.0, "x": -0.8}, tokens="x"))
    assert not result.matches
    assert not compare(answer(torn), answer({"a": -0.9, "b": -1.0, "c": -6.0}, tokens="c")).matches
    assert compare(answer(torn), answer(torn, tokens="b")).matches


def test_an_undecided_reference_does_not_excuse_other_differences() -> None:
    far = {"a": -2.0, "b": -0.1}
    assert not compare(answer(TORN), answer(far)).matches


def test_a_difference_before_the_parting_counts() -> None:
    moved = {"a": -0.1, "b": -5.0}
    assert not compare(answer(SURE, TORN), answer(moved, {"b": -0.69, "a": -0.70})).matches


def test_answers_without_a_common_token_do_not_match() -> None:
    result = compare(answer({"a": -0.1, "b": -3.0}), answer({"y": -0.1, "z": -3.0}))
    assert not result.matches
    assert result.max_logprob_diff == INF


@pytest.mark.parametrize("length", [0, 1, 3])
def test_answers_of_different_length_do_not_match(length: int) -> None:
    assert not compare(answer(SURE, SURE), answer(*[SURE] * length)).matches


def test_nothing_is_not_the_same_as_nothing() -> None:
    """Two answers without a token compare no KV."""
    assert not compare(answer(), answer()).matches


@pytest.mark.parametrize("at", [0, 1])
def test_nan_never_matches(at: int) -> None:
    broken = [SURE, SURE]
    broken[at] = {"a": NAN, "b": NAN}
    assert not compare(answer(SURE, SURE), answer(*broken, tokens="aa")).matches


def test_a_reference_with_one_candidate_is_decided() -> None:
    assert not compare(answer({"a": -0.1}), answer({"b": -0.1, "a": -0.1}, tokens="b")).matches


def test_parting_to_one_of_many_tokens_that_are_about_as_likely() -> None:
    """The list ends after five: the sixth may be as likely as they are."""
    flat = {"a": -2.0, "b": -2.1, "c": -2.2}
    assert compare(answer(flat), answer({**flat, "x": -1.9}, tokens="x"), tolerance=0.4).matches
    decided = {"a": -0.1, "b": -3.0, "c": -3.1}
    assert not compare(
        answer(decided), answer({**decided, "x": -2.8}, tokens="x"), tolerance=0.4
    ).matches


class TestNoise:
    def test_the_tolerance_without_noise_is_the_minimum(self) -> None:
        assert Noise().floor is None
        assert Noise().tolerance == LOGPROB_TOLERANCE
        assert Noise({"p": [0.0, 0.001]}).tolerance == LOGPROB_TOLERANCE

    def test_the_floor_is_that_of_all_engines(self) -> None:
        noise = Noise({"p": [0.3, 0.0], "c": [0.0, 0.0]})
        assert noise.floor == pytest.approx(0.15)
        assert LOGPROB_TOLERANCE < noise.tolerance < 1.5

    def test_a_rare_step_of_rounding_counts(self) -> None:
        """One of a thousand shows in no mean."""
        assert Noise({"p": [0.0] * 999 + [0.5]}).tolerance == pytest.approx(0.75)

    def test_the_tolerance_is_limited(self) -> None:
        most = Noise({"p": [MOST_NOISE]})
        assert most.contradicting == {}
        for wrong in (10.0, INF):
            poisoned = Noise({"p": [wrong], "c": [0.0]})
            assert poisoned.tolerance == pytest.approx(most.tolerance)
            assert set(poisoned.contradicting) == {"p"}

    def test_differences_of_an_engine_from_itself(self) -> None:
        moved = {"a": -0.2, "b": -3.0}
        assert self_differences(answer(SURE), answer(moved)) == pytest.approx([0.1, 0.0])
        parted = {"b": -0.1, "a": -3.0}
        assert len(self_differences(answer(SURE, SURE), answer(parted, SURE))) == 2

    @pytest.mark.parametrize("ruin", [{"y": -0.1}, {"a": NAN, "b": NAN}])
    def test_nothing_to_compare_does_not_count_as_small_noise(self, ruin: dict[str, float]) -> None:
        found = self_differences(answer(SURE), answer(ruin, tokens=next(iter(ruin))))
        assert max(found) == INF


def test_the_tolerance_is_between_rounding_and_ruin() -> None:
    assert 0.05 <= LOGPROB_TOLERANCE <= 0.5
