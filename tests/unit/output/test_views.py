"""What people read of each command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.spec import StackSpec
from deploy.document import as_document
from deploy.metrics.engine import CacheCounters
from deploy.metrics.store_stats import StoreStats
from deploy.output.check_view import check_view
from deploy.output.plan_view import plan_data, plan_view
from deploy.output.views import images_view, settings_view, status_view, swap_view
from deploy.planning.inventory import Inventory
from deploy.verify.hits import Hits, PairResult, Phase
from deploy.verify.items import Failure
from deploy.verify.report import CheckReport, Diagnosis, Equivalence, StoreUse
from deploy.verify.store_path import StorePath
from deploy.workflows.catalog_images import ImageRow
from deploy.workflows.prepare import Prepared
from deploy.workflows.saved_state import HistoryEntry
from deploy.workflows.status import ServiceStatus, StackStatus
from deploy.workflows.swap import SwapResult

Make = Callable[..., Prepared]

PASSED = CheckReport(
    pairs=(PairResult("producer-0", "consumer-0", Hits(1000, 850, 850)),),
    race=Phase(Hits(500, 400, 425), 2),
    equivalence=Equivalence(4, 0, 0.0123),
    store=StoreUse(2, 20, 3 << 20, 1 << 30, 0, 18),
    path=None,
    engines=(),
    failed=(),
    diagnosis=(),
    seconds=2.5,
)


class TestCheck:
    def test_a_passed_check_shows_both_hit_rates(self) -> None:
        text = check_view(PASSED)
        assert "External prefix cache hit rate: 85.0 %" in text
        assert "Eligible hit rate: 100.0 %" in text
        assert "producer-0 → consumer-0" in text
        assert "0 mismatches" in text
        assert "0.0123" in text
        assert "2 → 20 keys" in text
        assert "check passed in 2.5 s" in text
        assert "FAILED" not in text

    def test_noise_beside_what_is_tolerated(self) -> None:
        noisy = replace(PASSED, equivalence=Equivalence(4, 0, 0.5, 0.1234, 0.86))
        said = "an engine differs from itself by 0.1234 (root mean square)"
        assert f"Noise: {said}; differences up to 0.86 are tolerated" in check_view(noisy)
        assert "Noise: not measured" in check_view(PASSED)
        assert "differences up to 0.25 are tolerated" in check_view(PASSED)

    def test_bytes_moved_to_and_from_redis_are_shown(self) -> None:
        path = StorePath(stored_bytes=7.34e6, loaded_bytes=1e9, loaded_s=2, lookups=1)
        sound = check_view(replace(PASSED, path=path))
        assert "stored 7.3 MB, loaded 1000.0 MB at 0.50 GB/s" in sound
        assert "nothing refused, late or lost" in sound
        assert "Redis path" not in check_view(PASSED)
        broken = check_view(replace(PASSED, path=replace(path, refused=2, late=1)))
        assert "2 refused, 1 answers sent before their KV" in broken

    def test_failed_says_what_and_why_and_what_to_type(self) -> None:
        cause = Diagnosis("keys_lost", "Redis was flushed", "deploy check --name demo")
        text = check_view(
            replace(PASSED, failed=(Failure("equivalence", "nothing hit"),), diagnosis=(cause,))
        )
        for words in ("check FAILED", "nothing hit", "Redis was flushed", "keys_lost"):
            assert words in text
        assert "try: deploy check --name demo" in text
        assert "passed" not in text

    def test_almost_all_is_not_all(self) -> None:
        pair = PairResult("p", "c", Hits(10**6, 10**6 - 1, 10**6))
        text = check_view(replace(PASSED, pairs=(pair,), race=Phase(Hits(1, 0, 1))))
        assert "100.0 %" not in text

    def test_several_pairs_have_a_sum(self) -> None:
        pairs = [PairResult("p", f"c{number}", Hits(100, 80, 80)) for number in range(2)]
        assert "all pairs" in check_view(replace(PASSED, pairs=pairs))
        assert "all pairs" not in check_view(PASSED)


class TestPlan:
    def test_every_service_has_its_row(self, prepared: Make) -> None:
        made = prepared(topology="1p3d", port=9000)
        text = plan_view(made)
        for engine in made.plan.engines:
            assert engine.name in text
            assert str(engine.port) in text
        assert "1p3d" in text
        assert "http://127.0.0.1:9000" in text
        assert "image" not in text, "processes have none"

    def test_an_unknown_context_is_said_so(self, prepared: Make) -> None:
        made = prepared()
        plan = replace(made.plan, max_model_len=None, kv_bytes_per_token=None)
        text = plan_view(replace(made, plan=plan))
        assert "as the model says" in text
        assert "None" not in text

    @pytest.mark.parametrize("vendor", ["cpu", "cuda", "rocm"])
    @pytest.mark.parametrize("runtime", ["process", "compose"])
    def test_plan_data_is_plain_json(self, prepared: Make, vendor: str, runtime: str) -> None:
        data = plan_data(prepared(topology="2p2d", vendor=vendor, runtime=runtime, machine=None))
        assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, default=str))
        assert len(data["engines"]) == 4
        assert (data["vendor"], data["runtime"]) == (vendor, runtime)
        assert bool(data["image"]) is (runtime == "compose")

    def test_gpus_and_image_of_containers(self, prepared: Make) -> None:
        made = prepared(
            vendor="cuda", runtime="compose", gpus=4, tp=2, image="mine/vllm:1", machine=None
        )
        text = plan_view(made)
        rows = [re.split(r"  +", line) for line in text.splitlines()]
        assert [row[2] for row in rows if row[0] == "consumer-0"] == ["GPU 2,3"]
        assert [row[3] for row in rows if row[0] == "redis-0"] == ["-"], "no port"
        assert "image    mine/vllm:1" in text
        assert "note     assumed: 4 GPUs of 80 GiB" in text
        assert plan_data(made)["redis"]["port"] == 0

    @pytest.mark.parametrize("keyed", [False, True])
    def test_an_ipv6_address_is_in_brackets(self, prepared: Make, keyed: bool) -> None:
        made = prepared(bind="::1", **({"api_key_file": "/k"} if keyed else {}))
        assert "address  http://[::1]:8000" in plan_view(made)
        assert plan_data(made)["front"]["url"] == "http://[::1]:8000"
        assert made.stack.front.url == "http://[::1]:8000"

    def test_notes_for_people_and_scripts(self, prepared: Make) -> None:
        made = prepared(model="owner/new", redis={"memory_gib": 99})
        text, data = plan_view(made), plan_data(made)
        assert [line[9:] for line in text.splitlines() if line.startswith("note ")] == data["notes"]
        unknown, too_big = data["notes"]
        assert "KV size and context are unknown" in unknown
        assert "deploy up would refuse" in too_big
        assert plan_data(prepared())["notes"] == []

    def test_one_gpu_is_assumed_in_the_singular(self, prepared: Make) -> None:
        text = plan_view(prepared(vendor="cuda", runtime="compose", gpus=1, machine=None))
        assert "assumed: 1 GPU of 80 GiB" in text

    def test_a_gpu_that_is_shared(self, prepared: Make) -> None:
        text = plan_view(prepared(vendor="cuda", runtime="compose", gpus=1, machine=None))
        assert text.count("GPU 0, 45.0 % of it") == 2

    def test_nothing_is_assumed_of_a_machine_that_is_described(self, prepared: Make) -> None:
        assert "assumed" not in plan_view(prepared(machine=Inventory(4, 65536)))

    def test_the_capacity_of_the_store_is_shown_in_tokens(self, prepared: Make) -> None:
        made = prepared(redis={"memory_gib": 1})
        tokens = made.plan.store_tokens
        assert tokens is not None
        assert f"about {tokens:,} tokens" in plan_view(made)
        assert plan_data(made)["redis"]["tokens"] == tokens


def service(**changes: Any) -> ServiceStatus:
    usual = ServiceStatus(
        "consumer-0", "consumer", "ready", 42, "http://127.0.0.1:8011", 75.0, 3000, 0, "/log",
        CacheCounters(1000, 999, 0, 0),
    )  # fmt: skip
    return replace(usual, **changes)


class TestStatus:
    STATUS = StackStatus(
        "demo", True, "cpu", "process", "", "1p1d", "pdkit-tiny", "http://127.0.0.1:8000",
        (service(),), StoreStats(3, 1 << 20, 1 << 30, 4, 0, "id"),
    )  # fmt: skip

    def test_a_running_stack_shows_services_and_store(self) -> None:
        text = status_view(self.STATUS)
        for words in ("demo", "1p1d", "ready", "42", "2.9 GiB", "99.9 %", "3 keys", "4 evicted"):
            assert words in text
        assert "on cpu, runtime process" in text
        assert "image" not in text
        assert "history" not in text

    def test_the_image_of_containers(self) -> None:
        status = replace(self.STATUS, vendor="rocm", runtime="compose", image="mine/vllm:1")
        assert "on rocm, runtime compose, image mine/vllm:1" in status_view(status)

    def test_history_the_newest_first_with_the_reason_of_a_failure(self) -> None:
        past = [
            HistoryEntry("swap", "2026-03-01T10:00:00+00:00", "good", "rocm", "r:1", "1p1d"),
            HistoryEntry(
                "swap", "2026-02-01T10:00:00+00:00", "failed", "cuda", "c:2", "1p1d", "it died"
            ),
            HistoryEntry(
                "up", "2026-01-01T10:00:00+00:00", "good", "cpu", "", "1p1d", "", "lmcache-mp"
            ),
        ]
        status = replace(self.STATUS, history=past)
        lines = status_view(status).splitlines()
        at = lines.index("history, newest first:")
        assert [line[:10] for line in lines[at + 3 :]] == ["2026-03-01", "2026-02-01", "2026-01-01"]
        assert "it died" in lines[at + 4]
        assert "cpu, lmcache-mp" in lines[at + 5]
        assert "c:2" in lines[at + 4]
        shown = as_document(status)["history"]
        assert [one["outcome"] for one in shown] == ["good", "failed", "good"]

    def test_a_single_plan_shows_no_history(self) -> None:
        one = HistoryEntry("up", "2026-01-01T10:00:00+00:00", "good", "cpu", "", "1p1d")
        assert "history" not in status_view(replace(self.STATUS, history=(one,)))

    def test_a_stack_that_is_not_up_is_one_line(self) -> None:
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
    def test_a_stack_is_healthy_if_all_services_are_ready(
        self, condition: Any, up: bool, healthy: bool
    ) -> None:
        status = replace(self.STATUS, up=up, services=(service(condition=condition),))
        assert status.healthy is healthy

    def test_hit_rate_is_that_of_consumers(self) -> None:
        producer = service(role="producer", cache=CacheCounters(1000, 0, 0, 0))
        status = replace(self.STATUS, services=(producer, service(), service(cache=None)))
        assert status.external_hit_rate == pytest.approx(0.999)
        assert StackStatus("demo", up=False).external_hit_rate == 0.0
        assert set(as_document(status)) >= {"healthy", "external_hit_rate", "services", "store"}


class TestSwap:
    DONE = SwapResult(
        "demo", ("cuda", "c:1"), ("rocm", "r:1"), ("lmcache", "lmcache"), ("redis", "router"),
        31.52, 40.0, PASSED,
    )  # fmt: skip

    def test_a_swap_shows_before_after_and_downtime(self) -> None:
        text = swap_view(self.DONE)
        assert "'demo' runs on rocm, r:1 (before: cuda, c:1)" in text
        assert "31.5 s without service" in text
        assert "redis, router" in text
        assert text.endswith("deploy rollback --name demo")

    def test_the_hint_for_the_default_stack_has_no_name(self) -> None:
        assert swap_view(replace(self.DONE, name="pdkit")).endswith("deploy rollback")

    def test_a_swap_names_a_connector_that_is_not_the_default(self) -> None:
        same = replace(self.DONE, before=("cpu", ""), after=("cpu", ""))
        text = swap_view(replace(same, connectors=("lmcache", "lmcache-mp")))
        assert "runs on cpu, lmcache-mp (before: cpu)" in text
        back = swap_view(replace(same, connectors=("lmcache-mp", "lmcache")))
        assert "runs on cpu (before: cpu, lmcache-mp)" in back

    def test_a_swap_of_processes_names_no_image(self) -> None:
        text = swap_view(replace(self.DONE, before=("cpu", ""), after=("cuda", "")))
        assert "runs on cuda (before: cpu)" in text

    def test_a_swap_that_keeps_nothing_says_so(self) -> None:
        assert "kept running: nothing" in swap_view(replace(self.DONE, kept=()))

    def test_nothing_to_do(self) -> None:
        text = swap_view(replace(self.DONE, check=None))
        assert "already runs on rocm, r:1" in text
        assert "rollback" not in text

    def test_swap_data_is_plain_json(self) -> None:
        data = as_document(self.DONE)
        assert json.loads(json.dumps(data))["check"]["passed"] is True
        assert as_document(replace(self.DONE, check=None))["check"] is None


class TestImages:
    ROW = ImageRow(
        "cuda",
        "pdkit/vllm:1",
        "cuda",
        True,
        "0.25.1",
        "0.5.3",
        "derived",
        True,
        9216,
        "build",
        "2026-11-21",
        40,
        "",
    )

    def test_a_local_image_shows_age_and_size(self) -> None:
        text = images_view([self.ROW])
        for words in ("cuda *", "pdkit/vllm:1", "0.25.1", "0.5.3", "derived", "40 d", "9.0 GiB"):
            assert words in text

    def test_a_missing_image_shows_pull_or_build(self) -> None:
        assert "no: build" in images_view([replace(self.ROW, here=False, size_mib=0)])
        assert "no: pull" in images_view([replace(self.ROW, here=False, size_mib=0, how="pull")])

    def test_only_default_images_have_a_star(self) -> None:
        table = images_view([replace(self.ROW, default=False)]).partition("\n\n")[0]
        assert "*" not in table

    def test_notes_come_below(self) -> None:
        assert images_view([replace(self.ROW, note="needs a driver")]).endswith(
            "cuda: needs a driver"
        )

    def test_services_have_no_versions_of_vllm(self) -> None:
        service = replace(
            self.ROW, name="redis", vllm="", lmcache="", verdict="", default=False, vendor=""
        )
        assert "None" not in images_view([service])


def test_a_check_names_what_it_left_out() -> None:
    report = CheckReport(
        pairs=(PairResult("producer-0", "consumer-0", Hits(10, 8, 8)),),
        race=Phase(Hits(10, 8, 8), 1),
        equivalence=Equivalence(1, 0, 0.0),
        store=None,
        path=None,
        engines=(),
        failed=(),
        diagnosis=(),
        seconds=1.0,
        left_out=("keys in the store, because another has it",),
    )
    shown = check_view(report)
    assert "Left out: keys in the store, because another has it" in shown
    assert "producer-0 → consumer-0" in shown
    assert "share no KV" not in shown
    assert report.as_dict()["left_out"] == list(report.left_out)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("engine.args", ["--a b", "--c"], "engine.args  '--a b' --c"),
        ("engine.args", [], "engine.args  "),
        ("engine.env", {}, "engine.env  {}"),
        ("engine.env", {"HF_TOKEN": "hf_x"}, "engine.env.HF_TOKEN  ***"),
        ("engine.env", {"MY_PASSWORD": "x"}, "engine.env.MY_PASSWORD  ***"),
        ("engine.env", {"LD_PRELOAD": "./x.so"}, "engine.env.LD_PRELOAD  ./x.so"),
        ("engine.env", {"P": "http://a:b@c@d/"}, "engine.env.P  http://***@d/"),
        ("engine.env", {"X": "\u202eb"}, "engine.env.X  '\\u202eb'"),
        ("engine.key_file", "/key", "engine.key_file  /key"),
        ("redis.tls_files", ["/a", "/b"], "redis.tls_files  /a /b"),
    ],
)
def test_a_setting_as_it_is_shown(name: str, value: Any, shown: str) -> None:
    section, key = name.split(".")
    spec = StackSpec.model_validate({section: {key: value}})
    assert settings_view(spec, (name,)) == f"  {shown}\n"


def test_values_stand_in_a_column() -> None:
    spec = StackSpec.model_validate({"bind": "127.0.0.2", "monitoring": True})
    assert settings_view(spec, ("bind", "monitoring")) == (
        "  bind        127.0.0.2\n  monitoring  True\n"
    )
