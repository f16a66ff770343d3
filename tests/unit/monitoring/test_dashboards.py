"""Grafana's dashboards: as the script writes them, and about metrics that a real stack has."""

from __future__ import annotations

import re

import pytest
from grafana_foundation_sdk.models.dashboard import VariableRefresh

from scripts import dashboards
from tests.unit.monitoring.shipped import (
    BOARDS,
    FOLDER,
    LIMITS,
    METRIC,
    PROMETHEUS_OWN,
    RECORDED,
    RULES,
)


def known() -> set[str]:
    """Return what may be named: a stack's metrics, recorded rules, and Prometheus's own."""
    names = {name for file in RECORDED.glob("*.txt") for name in file.read_text().split()}
    return names | PROMETHEUS_OWN | LIMITS | {rule["record"] for rule in RULES if "record" in rule}


def expressions() -> dict[str, str]:
    """Return the expression of every panel and rule, by where it is."""
    panels = {
        f"{name}, {panel['title']}, {target['legendFormat']}": target["expr"]
        for name, board in BOARDS.items()
        for panel in board["panels"]
        for target in panel["targets"]
    }
    return panels | {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_each_dashboard_is_as_the_script_writes_it(name: str) -> None:
    written = (FOLDER / f"{name}.json").read_text()
    assert written == dashboards.text_of(dashboards.BOARDS[name]), (
        "run .venv/bin/python scripts/dashboards.py"
    )


def test_there_are_no_other_dashboards() -> None:
    assert BOARDS.keys() == dashboards.BOARDS.keys()
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("where", expressions())
def test_dashboards_name_only_existing_metrics(where: str) -> None:
    named = set(METRIC.findall(expressions()[where]))
    assert named
    assert named <= known(), "tests/fixtures/metrics does not have it"


def test_a_renamed_metric_is_noticed() -> None:
    named = set(METRIC.findall("rate(pdkit_store_pieces_total[1m]) / vllm:tokens"))
    assert named - known() == {"pdkit_store_pieces_total", "vllm:tokens"}


@pytest.mark.parametrize("name", BOARDS)
def test_choices_are_loaded_when_a_dashboard_opens(name: str) -> None:
    """Else there is nothing to choose: no stack's name is in the file."""
    variables = {one["name"]: one for one in BOARDS[name]["templating"]["list"]}
    assert "stack" in variables
    assert all(one["refresh"] == VariableRefresh.ON_DASHBOARD_LOAD for one in variables.values())
    text = " ".join(target["expr"] for p in BOARDS[name]["panels"] for target in p["targets"])
    assert set(re.findall(r"\$(\w+)", text)) == variables.keys()


@pytest.mark.parametrize(
    ("board", "jobs"), [("engines", {"engines"}), ("kv", {"engines", "kv-server"})]
)
def test_only_services_with_such_metrics_can_be_chosen(board: str, jobs: set[str]) -> None:
    variables = {one["name"]: one["query"] for one in BOARDS[board]["templating"]["list"]}
    offered = re.search(r'job=~"([^"]+)"', str(variables["service"]))
    assert offered
    every = ("engines", "router", "kv-server")
    assert {job for job in every if re.fullmatch(offered[1], job)} == jobs


def test_a_panel_shows_one_stack_only() -> None:
    for where, expression in expressions().items():
        if "," in where:  # a panel's
            selections = re.findall(r"{[^}]*}", expression)
            assert selections and all('stack="$stack"' in one for one in selections), where
