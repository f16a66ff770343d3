"""What a stack was before, as its state file keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deploy.errors import StateError
from deploy.workflows.prepare import Prepared, engine_image
from deploy.workflows.saved_state import (
    StackState,
    following,
    last_good,
    new_state,
    stack_history,
    with_failure,
    with_outcome,
)

Make = Callable[..., Prepared]


@pytest.fixture
def state(prepared: Make) -> Callable[..., StackState]:
    def make(action: str = "up", outcome: str = "", **fields: object) -> StackState:
        made = new_state(prepared(**fields), action, boot="now")
        return with_outcome(made, outcome) if outcome else made  # type: ignore[arg-type]

    return make


def test_a_new_one_is_unchecked(state: Callable[..., StackState]) -> None:
    (one,) = stack_history(state("swap", topology="2p1d"))
    assert (one.action, one.outcome, one.vendor, one.topology) == (
        "swap",
        "unchecked",
        "cpu",
        "2p1d",
    )
    assert one.at.endswith("+00:00")
    assert one.image == "", "processes have none"


def test_containers_have_an_image_and_outlive_a_boot(prepared: Make) -> None:
    made = prepared(vendor="rocm", runtime="compose", machine=None, image="mine/vllm:1")
    state = new_state(made, "up", boot="now")
    assert stack_history(state)[0].image == engine_image(made) == "mine/vllm:1"
    assert state.boot == ""


def test_history_is_the_newest_first_and_bounded(state: Callable[..., StackState]) -> None:
    current = state(topology="1p1d")
    for number in range(2, 30):
        current = following(current, state(topology=f"1p{number}d"))
    topologies = [one.topology for one in stack_history(current)]
    assert topologies == [f"1p{number}d" for number in range(29, 8, -1)]


def test_a_failure_is_history_of_what_serves_again(state: Callable[..., StackState]) -> None:
    old, tried = state(outcome="good"), state("swap", layerwise=True)
    after = with_failure(old, following(old, tried), "it died")
    failed, now = stack_history(after)
    assert (now.action, now.outcome) == ("up", "good")
    assert (failed.action, failed.outcome, failed.reason) == ("swap", "failed", "it died")
    assert after.plan == old.plan


def test_the_history_is_sorted_by_time(state: Callable[..., StackState]) -> None:
    def at(hour: int, one: StackState) -> StackState:
        when = f"2026-01-01T{hour:02}:00:00+00:00"
        entry = replace(one.plan.generation, at=when)
        return replace(one, plan=replace(one.plan, generation=entry))

    first = at(1, state("up", "good"))
    second = following(first, at(2, state("swap", "good", layerwise=True)))
    tried = following(second, at(3, state("swap", topology="1p3d")))
    after = with_failure(second, tried, "it died")
    went = [(one.at[11:13], one.outcome) for one in stack_history(after)]
    assert went == [("03", "failed"), ("02", "good"), ("01", "good")]


class TestLastGood:
    def test_the_newest_that_was_checked(self, state: Callable[..., StackState]) -> None:
        first = state(outcome="good", topology="1p1d")
        second = following(first, state(outcome="good", topology="1p2d"))
        third = following(second, state("swap", topology="1p3d"))
        assert last_good(third) == second.plan
        assert second.plan.spec.topology == "1p2d"

    @pytest.mark.parametrize("outcome", ["unchecked", "failed"])
    def test_others_are_passed_over(self, state: Callable[..., StackState], outcome: str) -> None:
        first = state(outcome="good", topology="1p1d")
        second = following(first, state(outcome=outcome, topology="1p2d"))
        third = following(second, state("swap", topology="1p3d"))
        assert last_good(third).spec.topology == "1p1d"

    def test_the_same_plan_is_nothing_to_go_back_to(self, state: Callable[..., StackState]) -> None:
        with pytest.raises(StateError, match="no earlier plan that passed") as caught:
            last_good(following(state(outcome="good"), state("rollback")))
        assert caught.value.exit_code == 2

    def test_a_rollback_without_history_is_an_error(self, state: Callable[..., StackState]) -> None:
        with pytest.raises(StateError):
            last_good(state(outcome="good"))
