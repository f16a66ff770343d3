"""What is read off engines' arguments and pages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.metrics.connector import FIX
from deploy.metrics.page import MetricsPage
from deploy.metrics.store_stats import StoreStats
from deploy.verify.diagnosis.evidence import CONNECTOR
from deploy.verify.store_path import PREFIX, Sample, failed_calls
from deploy.workflows.evidence import Readings, connector_of, known_against
from deploy.workflows.running import require_stack
from tests.unit.workflows.conftest import Lab


def transfer(**fields: Any) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps(fields)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), (None, False)),
        (("-m", "vllm"), ("", False)),
        (transfer(kv_connector=CONNECTOR), (CONNECTOR, False)),
        (
            transfer(kv_connector="X", kv_connector_extra_config={"use_native": True}),
            ("X", True),
        ),
        # vLLM takes the last, such as one of engine.args.
        ((*transfer(kv_connector=CONNECTOR), *transfer(kv_connector="X")), ("X", False)),
        (("=".join(transfer(kv_connector="X")),), ("X", False)),
        (("--kv-transfer-config", "no json"), (None, False)),
        (("--kv-transfer-config",), ("", False)),
    ],
)
def test_the_connector_that_arguments_name(
    arguments: tuple[str, ...], found: tuple[str | None, bool]
) -> None:
    assert connector_of(arguments) == found


def test_running_engines_tell_their_arguments_themselves(lab: Lab) -> None:
    lab.up(lab.spec())
    running = require_stack(lab.home, "pdkit")
    records, launcher = running.state.services, running.launcher
    assert connector_of(launcher.arguments(records["consumer-0"])) == (CONNECTOR, False)
    launcher.stop({"consumer-0": records["consumer-0"]}, grace_s=1)
    assert launcher.arguments(records["consumer-0"]) == ()


@pytest.mark.parametrize(
    ("vendor", "vllm", "lmcache", "link"),
    [
        ("cuda", "0.32.0", "0.5.6", "LMCache/issues/4463"),
        ("rocm", "0.32.0", "0.5.6", "LMCache/issues/4463"),
        ("cuda", "0.25.1", "0.5.6", "vllm/issues/53424"),
        ("cuda", "0.25.1", "0.5.3", ""),
        ("cpu", "0.32.0", "0.5.6", ""),
        ("cuda", "9.9", None, ""),
        ("cuda", "0.32.0", "unknown", ""),
    ],
)
def test_pairs_that_are_known_to_be_bad(
    vendor: str, vllm: str, lmcache: str | None, link: str
) -> None:
    """By the table that is shipped, and the versions that engines report."""
    kv = {"vllm": vllm, "lmcache": lmcache}
    said = known_against(vendor, kv)
    assert (link in said and vllm in said) if link else said == ""


class TestReadings:
    PAGE = MetricsPage((Sample(f"{PREFIX}chunks_total", {"operation": "load"}, 5.0),))

    def stats(self, run_id: str, evicted: int | None) -> StoreStats:
        return StoreStats(1, 1, 1, evicted, 0, run_id)

    def test_counts_grow_between_two_readings(self) -> None:
        seen = Readings(self.stats("a", 3), self.stats("a", 9), {}, {})
        assert seen.grown("evicted_keys") == 6 and seen.store_answered

    def test_nothing_is_known_of_another_server_or_of_none(self) -> None:
        for after in (self.stats("b", 9), self.stats("a", None)):
            assert Readings(self.stats("a", 3), after, {}, {}).grown("evicted_keys") is None
        silent = Readings(self.stats("a", 3), None, {}, {})
        assert silent.grown("evicted_keys") is None and not silent.store_answered

    def test_an_engine_that_is_gone_counted_nothing(self) -> None:
        seen = Readings(None, None, {"x": self.PAGE}, {"x": MetricsPage()})
        assert seen.page("x").samples == ()
        assert failed_calls(seen.page("x").samples) is None

    def test_what_all_moved_is_the_sum_of_what_each_counted_in_between(self) -> None:
        more = self.PAGE + self.PAGE
        before = {"x": self.PAGE, "restarted": more, "gone": self.PAGE}
        after = {"x": more, "restarted": self.PAGE, "gone": MetricsPage(), "new": self.PAGE}
        path = Readings(None, None, before, after).path
        assert path is not None and path.not_loaded == 3 * 5
        assert Readings(None, None, before, {"gone": MetricsPage()}).path is None

    def test_an_engine_that_died_reported_before(self) -> None:
        page = MetricsPage((Sample(FIX, {"fix": "B1", "state": "applied"}, 1.0),))
        seen = Readings(None, None, {"x": page}, {"x": MetricsPage()})
        assert seen.report("x").fixes == {"B1": "applied"}
        seen = Readings(None, None, {"x": page}, {"x": self.PAGE})
        assert seen.report("x").fixes == {}, "the last report counts"
