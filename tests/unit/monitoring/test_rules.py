"""Each alert of compose/monitoring/rules.yml, judged by promtool: it fires, and it does not."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.assets import asset
from deploy.stack.monitoring import latency_limits
from deploy.workflows.prepare import Prepared
from tests.unit.monitoring.shipped import LIMITS

RULES = asset("compose", "monitoring", "rules.yml")
_GROUPS = yaml.safe_load(RULES.read_text())["groups"]
GROUPS = [group["name"] for group in _GROUPS]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in _GROUPS for rule in group["rules"] if "alert" in rule
}
# Samples come every minute; what goes wrong begins after ten of them, and is judged after 25.
AT = "25m"
ENGINE = 'job="engines",stack="s"'
CONSUMER = f'{ENGINE},service="consumer-0",role="consumer"'
PRODUCER = f'{ENGINE},service="producer-0",role="producer"'
ROUTER = 'job="router",stack="s",service="router"'
KV_SERVER = 'job="kv-server",stack="s",service="kv-server"'


def steady(a_minute: float) -> str:
    return f"0+{a_minute:g}x30"


def changed(before: float, after: float) -> str:
    """Return a counter that grows by one number a minute, and later by another."""
    return f"0+{before:g}x9 {10 * before:g}+{after:g}x20"


def level(before: float, after: float) -> str:
    return f"{before:g}x9 {after:g}x20"


def latency(metric: str, seconds: float) -> dict[str, str]:
    """Return a histogram of requests that all took so long."""
    bounds = (0.05, 0.5, 1.0, 5.0)
    labels = f'{CONSUMER},model_name="m"'
    buckets = {bound: steady(60 if seconds <= bound else 0) for bound in bounds}
    return {f'{metric}_bucket{{{labels},le="{bound}"}}': one for bound, one in buckets.items()} | {
        f'{metric}_bucket{{{labels},le="+Inf"}}': steady(60)
    }


def hits(before: float, after: float, *, queries: float = 12_000) -> dict[str, str]:
    """Return tokens that consumers found in the store, of those they asked for."""
    return {
        f"vllm:external_prefix_cache_queries_total{{{CONSUMER}}}": steady(queries),
        f"vllm:external_prefix_cache_hits_total{{{CONSUMER}}}": changed(
            queries * before, queries * after
        ),
    }


def chunks(operation: str, result: str, after: float) -> dict[str, str]:
    labels = f'{CONSUMER},operation="{operation}",result="{result}"'
    return {f"pdkit_store_chunks_total{{{labels}}}": changed(0, after)}


def front(name: str, after: float) -> dict[str, str]:
    return {f"pdkit_router_{name}_total{{{ROUTER}}}": changed(0, after)}


def redis(metric: str, value: str) -> dict[str, str]:
    """Return what both engines tell of one shard."""
    return {f'pdkit_redis_{metric}{{{who},shard="0"}}': value for who in (PRODUCER, CONSUMER)}


def full(used: float) -> dict[str, str]:
    return redis("used_memory_bytes", level(1e6, used)) | redis("max_memory_bytes", "1000000000x30")


def no_room(value: str, *, loading: str = "0x30", reason: str = "l1_oom") -> dict[str, str]:
    """Return the chunks that LMCache's server did not store, and those it did not load."""
    return {
        f'lmcache_mp_l1_allocation_failure_chunks_total{{{KV_SERVER},during="l1_store"}}': value,
        f'lmcache_mp_l2_prefetch_failure_chunks_total{{{KV_SERVER},reason="{reason}"}}': loading,
    }


@dataclass(frozen=True)
class Case:
    """Series with which an alert fires, with labels, and some with which it does not."""

    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)


OF_ROUTER = {"job": "router", "service": "router"}
OF_CONSUMER = {"service": "consumer-0"}
OF_KV_SERVER = {"service": "kv-server"}
HEALTHY = f'pdkit_router_engine_healthy{{{ROUTER},engine="consumer-0",role="consumer"}}'
WAITS = f"pdkit_store_barrier_waits_total{{{PRODUCER},result="
CHANGED = "pdkit_model_changed{{{}}}"
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
CASES = {
    "PdkitServiceDown": Case(
        {f"up{{{CONSUMER}}}": level(1, 0)},
        {f"up{{{CONSUMER}}}": "1x30", 'up{job="another",stack="s",service="x"}': "0x30"},
        {"job": "engines", "service": "consumer-0", "role": "consumer"},
    ),
    "PdkitEngineNotServing": Case(
        {HEALTHY: level(1, 0)},
        {HEALTHY: "1x23 0 1x6"},  # too short to fire
        OF_ROUTER | {"engine": "consumer-0", "role": "consumer"},
    ),
    "PdkitModelChanged": Case(
        # All engines have ended, and none is started.
        {CHANGED.format(CONSUMER): "0x5 1x5 stale", CHANGED.format(PRODUCER): "0x10 stale"},
        {
            CHANGED.format(CONSUMER): "0x5 1x10 0x15",
            # A swap gave the stack another shape: this engine is gone.
            CHANGED.format(PRODUCER): "0x5 1x5 stale",
        },
    ),
    "PdkitDegraded": Case(front("degraded", 1), front("degraded", 0), OF_ROUTER),
    "PdkitRequestsFailed": Case(front("errors", 1), front("errors", 0), OF_ROUTER),
    "PdkitRetries": Case(front("retries", 1), front("retries", 0), OF_ROUTER),
    "PdkitSlowFirstToken": Case(latency(TTFT, 4), latency(TTFT, 0.9), {"role": "consumer"}),
    "PdkitSlowTokens": Case(latency(ITL, 0.4), latency(ITL, 0.04), {"role": "consumer"}),
    "PdkitNoHits": Case(hits(0.9, 0), hits(0, 0, queries=60)),
    "PdkitHitsFalling": Case(hits(0.9, 0.5), hits(0.9, 0.8)),
    "PdkitStoreLosses": Case(
        chunks("store", "failed", 1), chunks("store", "stored", 60), OF_CONSUMER
    ),
    "PdkitAnswersBeforeStores": Case(
        {f'{WAITS}"late"}}': changed(0, 1)},
        {f'{WAITS}"stored"}}': changed(0, 60), f'{WAITS}"late"}}': "0x30"},
        {"service": "producer-0"},
    ),
    "PdkitKvNotLoaded": Case(
        chunks("load", "missing", 1), chunks("load", "loaded", 9), OF_CONSUMER
    ),
    "PdkitKvRefused": Case(
        chunks("load", "corrupt", 1),
        chunks("load", "missing", 9) | {f"pdkit_store_replaced_total{{{CONSUMER}}}": changed(0, 9)},
        OF_CONSUMER,
    ),
    "PdkitWorkerSilent": Case(
        {f"pdkit_silent_workers{{{CONSUMER}}}": "1x30"},
        {f"pdkit_silent_workers{{{CONSUMER}}}": "1x23 0 1x6"},
        OF_CONSUMER,
    ),
    "PdkitLmcacheServerDown": Case(
        {f"up{{{KV_SERVER}}}": level(1, 0)},
        {f"up{{{KV_SERVER}}}": "1x23 0 1x6"},
        {"job": "kv-server", "service": "kv-server"},
    ),
    "PdkitLmcacheServerFull": Case(
        no_room("_x21 3x8"),
        no_room("7x30", loading=changed(0, 5), reason="not_found"),
        OF_KV_SERVER,
    ),
    "PdkitRedisDown": Case(redis("up", level(1, 0)), redis("up", "1x30"), {"shard": "0"}),
    "PdkitRedisEvicting": Case(
        redis("evicted_keys_total", changed(0, 5)), redis("evicted_keys_total", "7x30"),
        {"shard": "0"},
    ),
    "PdkitRedisFull": Case(full(9.9e8), full(9e8), {"shard": "0"}),
}  # fmt: skip


def expected(alert: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return a firing alert as promtool has to find it."""
    rule = ALERTS[alert]
    named = {"stack": "s", **labels}
    said = {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: named[match[1]], text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": {**named, **rule["labels"]}, "exp_annotations": said}


def judged(
    folder: Path, alerts: Iterable[str], rules: Path = RULES, limits: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Have promtool judge the cases of some alerts with these rules."""
    program = shutil.which("promtool")
    assert program, "promtool is not on PATH: apt-get install prometheus"
    tests = [
        {
            "interval": "1m",
            "name": f"{alert}, {kind}",
            "input_series": [{"series": name, "values": one} for name, one in series.items()],
            "alert_rule_test": [{"eval_time": AT, "alertname": alert, "exp_alerts": found}],
        }
        for alert in alerts
        for kind, series, found in (
            ("fires", CASES[alert].fires, [expected(alert, CASES[alert].labels)]),
            ("quiet", CASES[alert].quiet, []),
        )
    ]
    file = folder / "rules.test.yml"
    document = {
        "rule_files": [str(file) for file in (*limits, rules)],
        "evaluation_interval": "1m",
        "group_eval_order": [*(["pdkit-limits"] if limits else []), *GROUPS],  # else in any order
        "tests": tests,
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    argv = (program, "test", "rules", str(file))
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(ALERTS)


def test_each_alert_fires_only_in_its_case(tmp_path: Path) -> None:
    ran = judged(tmp_path, CASES)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("name", "limit_s", "agree"),
    [("s", 1.5, True), ("s", 9, False), ("s", 0.5, False), ("another", 9, True)],
    ids=["between", "too high", "too low", "another stack"],
)
def test_latency_limits_are_those_of_the_spec(
    tmp_path: Path, prepared: Callable[..., Prepared], name: str, limit_s: float, agree: bool
) -> None:
    """A first token after 4 s is to fire, and one after 0.9 s is not."""
    made = prepared(name=name, monitoring=True, slo={"ttft_s": limit_s})
    file = tmp_path / "limits.yml"
    file.write_text(text := latency_limits(made.plan))
    assert {rule["record"] for rule in yaml.safe_load(text)["groups"][0]["rules"]} == LIMITS
    ran = judged(tmp_path, ["PdkitSlowFirstToken"], limits=(file,))
    assert (ran.returncode == 0) is agree, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("alert", "old", "new"),
    [
        ("PdkitSlowFirstToken", "* 2)\n", "* 20)\n"),
        ("PdkitServiceDown", "up{job=", "down{job="),
        ("PdkitStoreLosses", 'result!="stored"', 'result!="failed"'),
        ("PdkitServiceDown", "critical", "info"),
        ("PdkitLmcacheServerDown", 'job="kv-server"', 'job="engines"'),
        ("PdkitLmcacheServerFull", '{reason="l1_oom"}', ""),
        ("PdkitLmcacheServerFull", "offset 5m", "offset 1s"),
    ],
    ids=["limit", "name", "label", "severity", "job", "reason", "first failure"],
)
def test_a_changed_rule_is_noticed(tmp_path: Path, alert: str, old: str, new: str) -> None:
    text = RULES.read_text()
    assert old in text
    other = tmp_path / "other.yml"
    other.write_text(text.replace(old, new, 1))
    assert judged(tmp_path, [alert]).returncode == 0
    assert judged(tmp_path, [alert], other).returncode != 0


@pytest.mark.parametrize(
    "seen",
    [
        no_room(changed(0, 1)),
        no_room("7x30", loading="_x21 3x8"),
        no_room("7x30", loading=changed(0, 1)),
    ],
    ids=["more stores fail", "a load fails", "more loads fail"],
)
def test_every_lack_of_room_in_the_server_counts_if_it_is_new(
    tmp_path: Path, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(seen, no_room("_x9 3x20"), OF_KV_SERVER)
    monkeypatch.setitem(CASES, "PdkitLmcacheServerFull", case)
    ran = judged(tmp_path, ["PdkitLmcacheServerFull"])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_says_what_to_do(alert: str) -> None:
    said = ALERTS[alert]["annotations"]
    assert said["summary"]
    assert re.search(r"deploy \w+|redis\.\w+", said["runbook"]), "a command, or a setting"
    assert ALERTS[alert]["labels"]["severity"] in ("critical", "warning", "info")
