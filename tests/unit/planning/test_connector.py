"""Why a plan's engines share KV as they do, and what the other connector would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.output.plan_view import plan_data, plan_view
from deploy.planning import connector
from deploy.planning.connector import HOW_TO, ConnectorChoice, connector_choice
from deploy.workflows.prepare import Prepared
from tests.conftest import REPO
from tests.unit.stack.cases import machine_with

Make = Callable[..., Prepared]
MP = {"connector": "lmcache-mp"}


def choice(found: Prepared) -> ConnectorChoice:
    made = connector_choice(found.plan, found.inventory)
    assert made is not None
    return made


def test_the_default_names_its_successor_where_it_works(prepared: Make) -> None:
    made = choice(prepared())
    assert made == ConnectorChoice("lmcache", False, "lmcache-mp", "")
    assert str(made).startswith("lmcache, inside each engine (default), which LMCache has deprec")
    assert str(made).endswith(f"works here too: {HOW_TO}")
    assert (REPO / HOW_TO).is_file()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"vendor": "cuda", "machine": machine_with("cuda", 0, 1)},
            "lmcache-mp runs on CPUs so far, and the vendor is cuda",
        ),
        ({"tp": 2}, "--tp: 2 does not work with lmcache-mp"),
        ({"layerwise": True}, "--layerwise: true does not work with lmcache-mp"),
    ],
)
def test_the_default_says_why_not_its_successor(
    prepared: Make, fields: dict[str, Any], why: str
) -> None:
    made = choice(prepared(**fields))
    assert why in made.refused
    assert f"lmcache-mp would be refused: {made.refused}" in str(made)
    assert HOW_TO not in str(made)


def test_the_successor_is_asked_for_and_the_default_is_still_possible(prepared: Make) -> None:
    made = choice(prepared(**MP))
    assert made == ConnectorChoice("lmcache-mp", True, "lmcache", "")
    assert "lmcache, inside each engine, is the default" in str(made)


@pytest.mark.parametrize(
    "fields", [{**MP, "lmcache": {"server_gib": 1}}, {"lmcache": {"staging_gib": 0.5}}]
)
def test_a_size_that_only_one_has_is_left_out_as_swap_does(
    prepared: Make, fields: dict[str, Any]
) -> None:
    assert choice(prepared(**fields)).refused == ""


def test_plan_shows_it_where_engines_share_kv(prepared: Make) -> None:
    found = prepared(**MP)
    assert f"\nsharing  {choice(found)}\n" in plan_view(found)
    assert plan_data(found)["connector_choice"] == {
        "name": "lmcache-mp", "asked": True, "other": "lmcache", "refused": "",
    }  # fmt: skip
    alone = prepared(topology="2a")
    assert "sharing" not in plan_view(alone)
    assert plan_data(alone)["connector_choice"] is None


def test_text_and_json_share_one_trial(prepared: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []

    def trial(*given: object) -> None:
        trials.append(given)

    monkeypatch.setattr(connector, "connector_choice", trial)
    found = prepared()
    plan_view(found)
    plan_data(found)
    assert len(trials) == 1
