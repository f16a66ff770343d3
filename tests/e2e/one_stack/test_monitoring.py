"""A real Prometheus watches the stack: every rule and every panel of the dashboards has data."""

from __future__ import annotations

import math
import os
import random
import re
from typing import Any

import httpx
import pytest

from deploy.runtime.engine_api import bearer
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME, PORT
from tests.unit.monitoring.shipped import BOARDS, LIMITS, RECORDED, RULES

PAGES = {"producer": PORT + 10, "consumer": PORT + 11, "router": PORT + 2}
PROMETHEUS = PORT + 3
_NAME = re.compile(r"^((?:vllm:|pdkit_)\w+)[{ ]", re.MULTILINE)


@pytest.fixture
def prometheus() -> Any:
    with httpx.Client(
        base_url=f"http://127.0.0.1:{PROMETHEUS}", trust_env=False, timeout=30
    ) as client:
        yield client


def found(prometheus: httpx.Client, expression: str) -> list[float]:
    """Return the values that an expression has now."""
    asked = expression.replace("$stack", NAME).replace("$service", ".+")
    answer = prometheus.get("/api/v1/query", params={"query": asked}).json()
    assert answer["status"] == "success", answer
    values = [float(one["value"][1]) for one in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def use_the_stack() -> None:
    """Send a prompt of its own, of two chunks."""
    prompt = [*random.choices(range(256), k=8), *range(256), *range(256), *range(90)]
    body = {"model": "pdkit-tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    httpx.post(url, json=body, trust_env=False, timeout=120).raise_for_status()


def names_on_page(kit: Deploy, name: str) -> set[str]:
    headers = {} if name == "router" else bearer(kit.engine_key(NAME))
    url = f"http://127.0.0.1:{PAGES[name]}/metrics"
    text = httpx.get(url, headers=headers, trust_env=False, timeout=30).text
    return set(_NAME.findall(text))


@pytest.mark.parametrize("name", PAGES)
def test_the_recorded_metrics_are_still_there(kit: Deploy, name: str) -> None:
    if name != "router":  # the first who asks for Redis's numbers has them read
        assert eventually(lambda: "pdkit_redis_up" in names_on_page(kit, name))
    found, file = names_on_page(kit, name), RECORDED / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text("".join(f"{one}\n" for one in sorted(found)))
    assert set(file.read_text().split()) <= found


def test_every_panel_has_data(prometheus: httpx.Client) -> None:
    wanted = {
        (board, panel["title"], target["expr"])
        for board, content in BOARDS.items()
        for panel in content["panels"]
        for target in panel["targets"]
    }

    def without_data() -> set[tuple[str, str, str]]:
        use_the_stack()  # panels show the last minute
        return {one for one in wanted if not found(prometheus, one[2])}

    assert eventually(lambda: not without_data(), every_s=2), without_data()


def test_every_rule_is_evaluated(prometheus: httpx.Client) -> None:
    use_the_stack()
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == LIMITS | {rule.get("alert") or rule["record"] for rule in RULES}
    assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
    recorded = [rule for rule in rules if rule.startswith("pdkit:")]
    assert recorded
    assert eventually(lambda: all(found(prometheus, rule) for rule in recorded), every_s=1)
    assert rules["PdkitKvRefused"]["alerts"] == [], "the one that a busy machine cannot cause"


def test_it_asks_with_the_key_shows_none_and_takes_no_orders(
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
