"""What people read of each command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.output.views import check_view, plan_data, plan_view, status_view
from deploy.planning.plan import Plan
from deploy.runtime.engine_api import CacheCounters
from deploy.runtime.store import StoreStats
from deploy.verify.report import (
    CheckReport,
    Diagnosis,
    Equivalence,
    Hits,
    PairResult,
    StoreUse,
)
from deploy.workflows.status import ServiceStatus, StackStatus

PASSED = CheckReport(
    pairs=(PairResult("producer-0", "consumer-0", Hits(1000, 850, 850)),),
    race=Hits(500, 400, 425),
    equivalence=Equivalence(4, 0, 0.0123),
    store=StoreUse(2, 20, 3 << 20, 0),
    engines=(),
    failures=(),
    diagnosis=(),
    seconds=2.5,
)


class TestCheck:
    def test_passed(self) -> None:
        text = check_view(PASSED)
        assert "External prefix cache hit rate: 85.0 %" in text
        assert "Eligible hit rate: 100.0 %" in text
        assert "producer-0 → consumer-0" in text
        assert "0 mismatches" in text
        assert "0.0123" in text
        assert "2 → 20 keys" in text
        assert "check passed in 2.5 s" in text
        assert "FAILED" not in text

    def test_failed_says_what_and_why_and_what_to_type(self) -> None:
        cause = Diagnosis("keys_lost", "Redis was flushed", "deploy check --name demo")
        text = check_view(replace(PASSED, failures=("nothing hit",), diagnosis=(cause,)))
        for words in ("check FAILED", "nothing hit", "Redis was flushed", "keys_lost"):
            assert words in text
        assert "try: deploy check --name demo" in text
        assert "passed" not in text

    def test_almost_all_is_not_all(self) -> None:
        pair = PairResult("p", "c", Hits(10**6, 10**6 - 1, 10**6))
        text = check_view(replace(PASSED, pairs=(pair,), race=Hits(1, 0, 1)))
        assert "100.0 %" not in text

    def test_several_pairs_have_a_sum(self) -> None:
        pairs = [PairResult("p", f"c{number}", Hits(100, 80, 80)) for number in range(2)]
        assert "all pairs" in check_view(replace(PASSED, pairs=pairs))
        assert "all pairs" not in check_view(PASSED)


class TestPlan:
    def test_every_service_has_its_row(self, plan: Callable[..., Plan]) -> None:
        made = plan(topology="1p3d", port=9000)
        text = plan_view(made)
        for engine in made.engines:
            assert engine.name in text
            assert str(engine.port) in text
        assert "1p3d" in text
        assert "http://127.0.0.1:9000" in text

    def test_an_unknown_context_is_said_so(self, plan: Callable[..., Plan]) -> None:
        made = replace(plan(), max_model_len=None, kv_bytes_per_token=None)
        assert "as the model says" in plan_view(made)
        assert "None" not in plan_view(made)

    def test_all_plain_values(self, plan: Callable[..., Plan]) -> None:
        data = plan_data(plan(topology="2p2d"))
        assert json.loads(json.dumps(data)) == data
        assert len(data["engines"]) == 4


def service(**changes: Any) -> ServiceStatus:
    usual = ServiceStatus(
        "consumer-0", "consumer", "ready", 42, "http://127.0.0.1:8011", 75.0, 3000, 0, "/log",
        CacheCounters(1000, 999, 0, 0),
    )  # fmt: skip
    return replace(usual, **changes)


class TestStatus:
    STATUS = StackStatus(
        "demo", True, "1p1d", "pdkit-tiny", "http://127.0.0.1:8000", (service(),),
        StoreStats(3, 1 << 20, 1 << 30, 4, 0, "id"),
    )  # fmt: skip

    def test_up(self) -> None:
        text = status_view(self.STATUS)
        for words in ("demo", "1p1d", "ready", "42", "2.9 GiB", "99.9 %", "3 keys", "4 evicted"):
            assert words in text

    def test_not_up(self) -> None:
        assert status_view(StackStatus("demo", up=False)) == "the stack 'demo' is not up"

    def test_an_engine_that_died(self) -> None:
        dead = service(condition="exited", pid=0, uptime_s=0, resident_mib=0, cache=None)
        text = status_view(replace(self.STATUS, services=(dead,), store=None))
        assert "exited" in text
        assert "%" not in text

    @pytest.mark.parametrize(
        ("condition", "up", "healthy"),
        [
            ("ready", True, True),
            ("not ready", True, False),
            ("exited", True, False),
            ("ready", False, False),
        ],
    )
    def test_health(self, condition: Any, up: bool, healthy: bool) -> None:
        status = replace(self.STATUS, up=up, services=(service(condition=condition),))
        assert status.healthy is healthy

    def test_hit_rate_is_that_of_consumers(self) -> None:
        producer = service(role="producer", cache=CacheCounters(1000, 0, 0, 0))
        status = replace(self.STATUS, services=(producer, service(), service(cache=None)))
        assert status.external_hit_rate == pytest.approx(0.999)
        assert StackStatus("demo", up=False).external_hit_rate == 0.0
        assert set(status.as_dict()) >= {"healthy", "external_hit_rate", "services", "store"}
