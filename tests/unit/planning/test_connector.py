"""Why a plan's engines share KV as they do, and what the other connector would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.output.plan_view import plan_data, plan_view
from deploy.planning import connector
from deploy.planning.connector import HOW_TO, ConnectorChoice
from deploy.workflows.prepare import Prepared
from tests.conftest import REPO
from tests.unit.stack.cases import machine_with

Make = Callable[..., Prepared]
MP = {"connector": "lmcache-mp"}
CATALOGUE, SERVERS = ("0.25.1", "0.5.3"), ("0.32.0", "0.5.6")


def choice(found: Prepared) -> ConnectorChoice:
    made = found.connector_choice
    assert made is not None
    return made


def test_the_default_connector_names_its_successor_if_that_works(prepared: Make) -> None:
    made = choice(prepared())
    assert made == ConnectorChoice("lmcache", False, "lmcache-mp", "")
    assert str(made).startswith("lmcache, inside each engine (default), which LMCache has deprec")
    assert str(made).endswith(f"works here too: {HOW_TO}")
    assert str(made).startswith(f"{prepared().chosen_connector}, ")
    assert (REPO / HOW_TO).is_file()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"vendor": "rocm", "runtime": "compose", "machine": machine_with("rocm", 0, 1)},
            "lmcache-mp does not work in containers on rocm: HIP opens memory of another process",
        ),
        (
            {"vendor": "rocm", "machine": machine_with("rocm", 0, 1), "versions": CATALOGUE},
            "on rocm through LMCache's server is broken: engines and LMCache's server wait for",
        ),
        (
            {"vendor": "cuda", "machine": machine_with("cuda", 0, 1), "versions": CATALOGUE},
            "vLLM 0.25.1 with LMCache 0.5.3 on cuda through LMCache's server is untested",
        ),
        ({"layerwise": True}, "--layerwise: true does not work with lmcache-mp"),
    ],
)
def test_the_default_connector_says_why_its_successor_does_not_work(
    prepared: Make, fields: dict[str, Any], why: str
) -> None:
    made = choice(prepared(**fields))
    assert why in made.refused
    assert f"lmcache-mp would be refused: {made.refused}" in str(made)
    assert HOW_TO not in str(made)


def test_the_successor_is_asked_for_and_the_default_is_still_possible(prepared: Make) -> None:
    made = choice(prepared(**MP))
    assert made == ConnectorChoice("lmcache-mp", True, "lmcache", "")
    assert prepared(**MP).chosen_connector == "lmcache-mp, through LMCache's server (asked for)"
    assert str(made).endswith(
        "lmcache, inside each engine, works here too, and LMCache has deprecated it"
    )


@pytest.mark.parametrize(
    "of",
    [{"versions": SERVERS}, {"runtime": "compose", "image": "cuda-mp"}],
    ids=["process", "image"],
)
def test_the_successor_is_the_default_where_only_it_works(
    prepared: Make, of: dict[str, Any]
) -> None:
    found = prepared(vendor="cuda", machine=machine_with("cuda", 0, 1), **of)
    made = choice(found)
    assert (made.name, made.asked, found.plan.kv_server is not None) == ("lmcache-mp", False, True)
    assert (
        "(default: lmcache does not work with these versions); lmcache would be refused: vLLM"
        in str(made)
    )
    assert "answers are silently wrong" in made.refused


def test_an_image_is_that_of_the_connector(prepared: Make) -> None:
    def image(**fields: Any) -> str:
        found = prepared(vendor="cuda", runtime="compose", machine=None, **fields)
        return found.facts.software.engine_image

    assert image() == "pdkit/vllm-cuda:0.25.1-lmcache0.5.3"
    assert image(**MP) == "pdkit/vllm-cuda:0.32.0-lmcache0.5.6"
    assert choice(prepared(vendor="cuda", runtime="compose", machine=None)).refused == ""


def test_engines_that_share_nothing_need_no_connector(prepared: Make) -> None:
    alone = {"vendor": "cuda", "machine": machine_with("cuda", 0, 1), "topology": "2a"}
    found = prepared(versions=SERVERS, **alone)
    assert found.plan.kv_server is None
    assert found.connector_choice is None
    assert found.chosen_connector == ""


def test_a_connector_that_does_not_work_is_refused_with_one_that_does(prepared: Make) -> None:
    with pytest.raises(ConfigError, match="silently wrong") as caught:
        prepared(vendor="cuda", runtime="compose", machine=None, image="cuda-mp",
                 connector="lmcache")  # fmt: skip
    assert caught.value.hint_for("plan").startswith("--connector lmcache-mp, or --image cuda")


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


def test_text_and_json_try_the_other_connector_once(
    prepared: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = []

    def trial(*given: object, **_more: object) -> None:
        trials.append(given)

    monkeypatch.setattr(connector, "connector_choice", trial)
    found = prepared()
    plan_view(found)
    plan_data(found)
    assert len(trials) == 1
