"""The saved state of a stack: what is written is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deploy.config import compat
from deploy.config.kinds import Kind
from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.runtime.state import ServiceRecord, read_state_file
from deploy.workflows.prepare import Prepared
from deploy.workflows.running import find_stack
from deploy.workflows.saved_state import (
    StackState,
    following,
    new_state,
    restored_facts,
    restored_model,
    restored_state,
    with_failure,
    write_state,
)
from tests.unit.stack.cases import FOLDER_MODEL

Make = Callable[..., Prepared]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Home(tmp_path, tmp_path).stack("pdkit").state_file


@pytest.fixture
def state(prepared: Make) -> Callable[..., StackState]:
    return lambda **fields: new_state(prepared(**fields), "up", boot="")


def read(file: Path) -> StackState:
    found = read_state_file(file, "pdkit")
    assert found is not None
    return restored_state(found)


def changed(file: Path, change: Callable[[Any], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_what_is_written_is_read(
    file: Path, state: Callable[..., StackState], runtime: str
) -> None:
    old = state(runtime=runtime, topology="1p1d")
    new = following(old, state(runtime=runtime, topology="1p2d"))
    new = with_failure(new, state(runtime=runtime, topology="2p1d"), "it died")
    new = replace(new, up_extra_s=2.5).with_service(ServiceRecord("redis", 1, 2.0, "/log"))
    write_state(file, new)
    assert read(file) == new


def test_settings_that_an_earlier_version_had_are_left_out(
    file: Path, state: Callable[..., StackState]
) -> None:
    """They could only repeat `tp`, so a stack that runs stays known."""
    old = state(tp=2, topology="1p1d")
    write_state(file, old)
    changed(file, lambda values: values["spec"].update(producer_tp=2, consumer_tp=None))
    assert read(file) == old


def test_a_record_is_added_without_changing_the_old_state(
    state: Callable[..., StackState],
) -> None:
    old = state().with_service(ServiceRecord("redis"))
    more = old.with_service(ServiceRecord("router", 1, 2.0, "/logs/router.log"))
    assert set(more.services) == {"redis", "router"}
    assert set(old.services) == {"redis"}


def test_an_earlier_plan_that_does_not_fit_is_left_out(
    file: Path, state: Callable[..., StackState]
) -> None:
    first, second = state(topology="1p1d"), state(topology="1p2d")
    write_state(file, following(following(first, second), state()))
    changed(file, lambda values: values["history"][0]["spec"].update(unknown=1))
    assert read(file).history == (first.plan,)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["spec"].update(unknown=1),
        lambda values: values["machine"].pop("inventory"),
        lambda values: values.update(model=5),
        lambda values: values["model"].update(unknown=1),
        lambda values: values.update(generation=None),
        lambda values: values.pop("generation"),  # as in files of the first format
        lambda values: values["generation"].update(unknown=1),
        lambda values: values.update(history=5),
        lambda values: values.update(up_extra_s="soon"),
        lambda values: values.update(up_extra_s=[]),
    ],
)
def test_one_that_does_not_fit_says_how_to_go_on(
    file: Path, state: Callable[..., StackState], change: Callable[[Any], object]
) -> None:
    write_state(file, state())
    home = Home(file.parents[2], file.parents[2])
    assert find_stack(home, "pdkit")
    changed(file, change)
    with pytest.raises(StateError, match="does not fit this version") as caught:
        find_stack(home, "pdkit")
    assert str(file) in caught.value.message
    assert "deploy down --name pdkit" in caught.value.hint


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "cpu"])
@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_facts_and_model_survive_their_file(prepared: Make, vendor: str, runtime: str) -> None:
    made = prepared(vendor=vendor, runtime=runtime, machine=None, given=FOLDER_MODEL)
    facts = json.loads(json.dumps(asdict(made.facts)))
    assert restored_facts(facts) == made.facts
    assert restored_model(json.loads(json.dumps(asdict(made.model)))) == made.model


def test_kinds_survive_their_file() -> None:
    made = replace(FOLDER_MODEL, kind=Kind(window=256, mla=True))
    assert restored_model(json.loads(json.dumps(asdict(made)))) == made


def test_a_model_of_unknown_shape_survives_its_file(prepared: Make) -> None:
    made = replace(prepared().model, shape=None)
    assert restored_model(json.loads(json.dumps(asdict(made)))) == made


def test_a_stack_keeps_the_connector_that_it_was_started_with(
    prepared: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a later table of versions would choose another; so nobody reads the table."""
    home = Home(tmp_path, tmp_path)
    state = new_state(prepared(vendor="cuda", machine=None, runtime="compose"), "up", boot="")
    assert state.plan.spec.connector is None, "the versions decided"
    write_state(home.stack("pdkit").state_file, state)
    monkeypatch.setattr(compat, "load_rules", lambda: pytest.fail("the table is read"))
    found = find_stack(home, "pdkit")
    assert found is not None
    assert found.prepared.plan.connector == "lmcache"
