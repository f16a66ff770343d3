"""A real Prometheus watches the stack: every rule and every panel of the dashboards has data."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from deploy.runtime.engine_api import bearer
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME, PORT
from tests.e2e.prometheus import found, names_on, prometheus_of, recorded, without_data
from tests.unit.monitoring.shipped import BOARDS, LIMITS, RULES

PAGES = {"producer": PORT + 10, "consumer": PORT + 11, "router": PORT + 2}


@pytest.fixture
def prometheus() -> Any:
    with prometheus_of(PORT) as client:
        yield client


def use_the_stack() -> None:
    """Send a prompt of its own, of two chunks."""
    prompt = [*random.choices(range(256), k=8), *range(256), *range(256), *range(90)]
    body = {"model": "pdkit-tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    httpx.post(url, json=body, trust_env=False, timeout=120).raise_for_status()


def names_on_page(kit: Deploy, name: str) -> set[str]:
    headers = {} if name == "router" else bearer(kit.engine_key(NAME))
    url = f"http://127.0.0.1:{PAGES[name]}/metrics"
    return names_on(httpx.get(url, headers=headers, trust_env=False, timeout=30).text)


@pytest.mark.parametrize("name", PAGES)
def test_the_recorded_metrics_are_still_there(kit: Deploy, name: str) -> None:
    """Redis's are once somebody has asked for them, but on a page for which a worker is late."""
    at_least = set() if name == "router" else {"pdkit_redis_up"}

    def missing() -> set[str]:
        names = names_on_page(kit, name)
        return (recorded(name, names) | at_least) - names

    assert eventually(lambda: not missing()), missing()


def test_every_panel_has_data(prometheus: httpx.Client) -> None:
    boards = BOARDS.keys() - {"kv-server"}  # tests/e2e/test_lmcache_server.py

    def empty() -> set[tuple[str, str, str]]:
        use_the_stack()  # panels show the last minute
        return without_data(prometheus, NAME, boards)

    assert eventually(lambda: not empty(), every_s=2), empty()


def test_every_rule_is_evaluated(prometheus: httpx.Client) -> None:
    use_the_stack()
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == LIMITS | {rule.get("alert") or rule["record"] for rule in RULES}
    assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
    rates = [rule for rule in rules if rule.startswith("pdkit:")]
    assert rates
    assert eventually(lambda: all(found(prometheus, NAME, rule) for rule in rates), every_s=1)
    assert rules["PdkitKvRefused"]["alerts"] == [], "the one that a busy machine cannot cause"


def test_prometheus_uses_the_key_shows_none_and_has_no_admin_api(
    kit: Deploy, prometheus: httpx.Client
) -> None:
    def health() -> dict[str, str]:
        targets = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
        return {one["labels"]["service"]: one["health"] for one in targets}

    up = dict.fromkeys(("producer-0", "consumer-0", "router"), "up")
    assert eventually(lambda: health() == up), health()
    shown = prometheus.get("/api/v1/status/config").text
    assert "credentials_file" in shown
    assert kit.engine_key(NAME).reveal() not in shown
    for path in ("/-/quit", "/-/reload", "/api/v1/admin/tsdb/snapshot", "/api/v1/write"):
        assert prometheus.post(path).status_code >= 400, path
    assert prometheus.get("/-/ready").status_code == 200
