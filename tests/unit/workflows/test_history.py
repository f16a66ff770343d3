"""What a stack was before, as its state file keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from deploy.config.kinds import Kind
from deploy.errors import StateError
from deploy.runtime.state import ServiceRecord, StackState
from deploy.workflows.history import (
    following,
    last_good,
    new_state,
    stack_history,
    with_failure,
    with_outcome,
)
from deploy.workflows.prepare import Prepared, engine_image
from deploy.workflows.running import restored_facts, restored_model
from tests.unit.stack.cases import FOLDER_MODEL

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


def test_the_connector_of_a_state_that_does_not_name_it_is_the_specs(
    state: Callable[..., StackState],
) -> None:
    old, older = state(connector="lmcache-mp"), state()
    for one in (old, older):
        del one.generation["connector"]
    found = {one.connector for one in stack_history(following(older, old))}
    assert found == {"lmcache", "lmcache-mp"}


def test_containers_have_an_image_and_outlive_a_boot(prepared: Make) -> None:
    made = prepared(vendor="rocm", runtime="compose", machine=None, image="mine/vllm:1")
    state = new_state(made, "up", boot="now")
    assert stack_history(state)[0].image == engine_image(made) == "mine/vllm:1"
    assert state.boot == ""


def test_the_history_is_valid_json(state: Callable[..., StackState]) -> None:
    old, new = state(), state("swap", layerwise=True)
    text = json.dumps(asdict(following(old, new)))
    assert json.loads(text)["history"][0]["fingerprint"] == old.fingerprint


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
    assert after.fingerprint == old.fingerprint


def test_the_history_is_sorted_by_time(state: Callable[..., StackState]) -> None:
    def at(hour: int, one: StackState) -> StackState:
        when = f"2026-01-01T{hour:02}:00:00+00:00"
        return replace(one, generation={**one.generation, "at": when})

    first = at(1, state("up", "good"))
    second = following(first, at(2, state("swap", "good", layerwise=True)))
    tried = following(second, at(3, state("swap", topology="1p3d")))
    after = with_failure(second, tried, "it died")
    went = [(one.at[11:13], one.outcome) for one in stack_history(after)]
    assert went == [("03", "failed"), ("02", "good"), ("01", "good")]


def test_services_are_of_the_moment(state: Callable[..., StackState]) -> None:
    old = state().with_service(ServiceRecord("redis", 1, 2.0, "/log"))
    assert "services" not in following(old, state()).history[0]


class TestLastGood:
    def test_the_newest_that_was_checked(self, state: Callable[..., StackState]) -> None:
        first = state(outcome="good", topology="1p1d")
        second = following(first, state(outcome="good", topology="1p2d"))
        third = following(second, state("swap", topology="1p3d"))
        spec, facts, model = last_good(third)
        assert spec.topology == "1p2d"
        assert facts["runtime"] == "process"
        assert model["served_name"] == "pdkit-tiny"

    @pytest.mark.parametrize("outcome", ["unchecked", "failed"])
    def test_others_are_passed_over(self, state: Callable[..., StackState], outcome: str) -> None:
        first = state(outcome="good", topology="1p1d")
        second = following(first, state(outcome=outcome, topology="1p2d"))
        third = following(second, state("swap", topology="1p3d"))
        assert last_good(third)[0].topology == "1p1d"

    def test_the_same_plan_is_nothing_to_go_back_to(self, state: Callable[..., StackState]) -> None:
        with pytest.raises(StateError, match="no earlier plan that passed") as caught:
            last_good(following(state(outcome="good"), state("rollback")))
        assert caught.value.exit_code == 2

    def test_a_rollback_without_history_is_an_error(self, state: Callable[..., StackState]) -> None:
        with pytest.raises(StateError):
            last_good(state(outcome="good"))


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "cpu"])
@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_facts_and_model_survive_their_file(prepared: Make, vendor: str, runtime: str) -> None:
    made = prepared(vendor=vendor, runtime=runtime, machine=None, given=FOLDER_MODEL)
    facts = json.loads(json.dumps(asdict(made.facts)))
    assert restored_facts(facts) == made.facts
    assert restored_model(json.loads(json.dumps(asdict(made.model)))) == made.model


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_facts_of_an_older_file_had_another_key(prepared: Make, runtime: str) -> None:
    made = prepared(runtime=runtime)
    older = json.loads(json.dumps(asdict(made.facts)))
    older["means"] = older.pop("software")
    assert restored_facts(older) == made.facts
    del older["means"]
    with pytest.raises(KeyError):
        restored_facts(older)


def test_kinds_survive_their_file_and_older_files_have_none() -> None:
    made = replace(FOLDER_MODEL, kind=Kind(window=256, mla=True))
    assert restored_model(json.loads(json.dumps(asdict(made)))) == made
    older = {key: value for key, value in asdict(FOLDER_MODEL).items() if key != "kind"}
    assert restored_model(json.loads(json.dumps(older))) == FOLDER_MODEL


def test_an_older_models_state_lacks_nothing_that_is_needed(prepared: Make) -> None:
    made = replace(prepared().model, shape=None)
    assert restored_model(json.loads(json.dumps(asdict(made)))) == made
