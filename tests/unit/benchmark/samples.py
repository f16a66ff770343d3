"""A result of a benchmark run, for tests."""

from __future__ import annotations

from typing import Any

from deploy.benchmark.results import Result

LATENCY = {"p50": 0.1, "p90": 0.2, "p99": 0.3, "mean": 0.12}


def repeat(index: int = 0, **changed: Any) -> dict[str, Any]:
    return {
        "index": index,
        "rate": 2.0,
        "concurrency": None,
        "duration_s": 10.0,
        "warmup_s": 1.0,
        "sent": 20,
        "completed": 20,
        "failed": 0,
        "errors": {},
        "ttft_s": LATENCY,
        "itl_s": LATENCY,
        "e2e_s": LATENCY,
        "requests_per_s": 2.0,
        "input_tokens_per_s": 2000.0,
        "output_tokens_per_s": 32.0,
        "within_slo": 1.0,
        "goodput_per_s": 2.0,
        "hits": {
            "external": 900,
            "eligible": 900,
            "local": 0,
            "computed": 1100,
            "queried": 1000,
        },
        "redis_path": None,
        "usage": {"cpu_s": {"producer-0": 4.0}, "peak_rss_bytes": {"producer-0": 10**9}},
        **changed,
    }


def result(**changed: Any) -> Result:
    """Return a valid result with some top-level fields changed."""
    return Result.model_validate(
        {
            "started": "2026-01-01T00:00:00Z",
            "command": ["deploy", "bench"],
            "seed": 0,
            "machine": {
                "processor": "a processor",
                "cores": 2,
                "memory_gib": 24.0,
                "gpus": [],
                "load_1m": 0.1,
                "os": "Linux",
                "python": "3.11.2",
            },
            "versions": {
                "pdkit": "1",
                "vllm": "0.32.0",
                "lmcache": "0.5.6",
                "redis": "7.0",
                "router": "0.1.17",
                "generator": "pdkit 1",
            },
            "model": {
                "name": "pdkit-tiny", "dtype": "bfloat16", "kv_bytes_a_token": 4096,
                "context": 4096,
            },
            "stack": {
                "vendor": "cpu",
                "runtime": "process",
                "topology": "1p1d",
                "tp": 1,
                "engines": 2,
                "gpus": 0,
                "redis": True,
                "shards": 1,
                "chunk_size": 256,
            },
            "workload": {"name": "random", "input_tokens": 1000},
            "slo": {"ttft_s": 1.0},
            "repeats": [repeat()],
            **changed,
        }
    )  # fmt: skip
