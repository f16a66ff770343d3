"""Readings of a stack, made of a few numbers, as a running one gives them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceCondition, ServiceReading, StackReading
from deploy.metrics.store_stats import StoreStats
from deploy.verify.store_path import Sample

BEGAN = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)


def page(**values: float) -> MetricsPage:
    """Return an engine's page of counters and gauges by short names; `run` and `kv` are gauges."""
    return MetricsPage(
        tuple(sample for name, value in values.items() for sample in _of(name, value))
    )


def _of(name: str, value: float) -> list[Sample]:
    known = {
        "queries": "vllm:prefix_cache_queries_total",
        "hits": "vllm:prefix_cache_hits_total",
        "asked": "vllm:external_prefix_cache_queries_total",
        "found": "vllm:external_prefix_cache_hits_total",
        "prompt": "vllm:prompt_tokens_total",
        "out": "vllm:generation_tokens_total",
        "answers": "vllm:request_success_total",
        "run": "vllm:num_requests_running",
        "wait": "vllm:num_requests_waiting",
        "kv": "vllm:kv_cache_usage_perc",
        "first_count": "vllm:time_to_first_token_seconds_count",
        "first_sum": "vllm:time_to_first_token_seconds_sum",
        "requests": "pdkit_router_requests_total",
        "errors": "pdkit_router_errors_total",
        "waits": "pdkit_store_barrier_waits_total",
    }
    if name == "health":
        return [
            Sample("pdkit_router_engine_healthy", {"engine": str(n)}, n < value) for n in (0, 1)
        ]
    if name in known:
        return [Sample(known[name], {"result": "stored"} if name == "waits" else {}, value)]
    operation, result = name.split("_", 1)  # such as load_corrupt: chunks of the Redis path
    return [Sample("pdkit_store_chunks_total", {"operation": operation, "result": result}, value)]


def service(
    name: str,
    page: MetricsPage | None = None,
    *,
    condition: ServiceCondition = "ready",
    pid: int = 10,
    clock_s: float | None = None,
) -> ServiceReading:
    return ServiceReading(
        name,
        name.split("-", maxsplit=1)[0],
        condition,
        pid,
        page,
        -1.0 if clock_s is None else clock_s,
    )


def stats(**changes: Any) -> StoreStats:
    usual: dict[str, Any] = {
        "keys": 14, "used_memory_bytes": 8 << 20, "max_memory_bytes": 1 << 30, "evicted_keys": 0,
        "flushes": 0, "run_id": "a", "commands": 100, "received_bytes": 10_000_000,
        "sent_bytes": 20_000_000, "clients": 7,
    }  # fmt: skip
    return StoreStats(**{**usual, **changes})


def reading(second: float, *services: ServiceReading, **changes: Any) -> StackReading:
    """Return a reading at a second after the beginning; its services were read then, too."""
    found = {
        one.name: one if one.clock_s >= 0 else replace(one, clock_s=second) for one in services
    }
    usual: dict[str, Any] = {
        "up": True,
        "what": "1p1d, pdkit-tiny, http://127.0.0.1:8000",
        "store": stats(),
    }
    at = BEGAN + timedelta(seconds=second)
    return StackReading("demo", at, 1000.0 + second, services=found, **{**usual, **changes})
