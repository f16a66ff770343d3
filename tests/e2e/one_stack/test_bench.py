"""`deploy bench` on real engines: every request answered, and the hits that the engines count."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.benchmark.results import Result, read_requests, read_result
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME
from tests.e2e.one_stack.test_one_stack import CONSUMER, PRODUCER, counted

SCHEMA = Path(__file__).resolve().parents[3] / "docs/reference/schemas/bench.json"
SOURCES = "vllm:prompt_tokens_by_source_total"
# By which the router is measured: 16 by the router and 16 directly, on two engines each; 20 one
# after the other, and three rounds of 40.
ROUTER_TOKENS = (20 + 3 * 40) * 4 * 16
Bench = Callable[..., Result]


@pytest.fixture
def bench(kit: Deploy, tmp_path: Path) -> Bench:
    """Return what runs one repeat, and returns the result that it wrote."""

    def run(*options: str) -> Result:
        argv = ("bench", "--name", NAME, "--warmup", "0", "--repeats", "1", "--out", str(tmp_path))
        data = kit.ok(*argv, *options)
        result = read_result(tmp_path)
        assert data["folder"] == str(tmp_path)
        assert data["result"] == result.model_dump(mode="json")
        return result

    return run


def source(kit: Deploy, port: int, name: str) -> float:
    return counted(kit, port, f'{SOURCES}{{engine="0",model_name="pdkit-tiny",source="{name}"}}')


def test_new_prompts_are_measured_with_their_hits(
    kit: Deploy, bench: Bench, tmp_path: Path
) -> None:
    before = source(kit, CONSUMER, "external_kv_transfer")
    computed = source(kit, PRODUCER, "local_compute") + source(kit, CONSUMER, "local_compute")
    result = bench("--requests", "6", "--input-tokens", "600", "--output-tokens", "9")
    (repeat,) = result.repeats
    assert (repeat.sent, repeat.completed, repeat.errors) == (6, 6, {})
    assert repeat.hits and repeat.usage and repeat.redis_path
    assert repeat.hits.external == repeat.hits.eligible == 6 * 512
    alone = result.one_user
    assert alone and alone.hits and (alone.completed, alone.concurrency) == (8, 1)
    assert alone.hits.external == alone.hits.eligible == 8 * 512
    loaded = repeat.hits.external + alone.hits.external
    assert source(kit, CONSUMER, "external_kv_transfer") - before == loaded
    now = source(kit, PRODUCER, "local_compute") + source(kit, CONSUMER, "local_compute")
    assert repeat.hits.computed == 6 * (600 + 88)
    assert now - computed == repeat.hits.computed + alone.hits.computed + ROUTER_TOKENS
    assert result.router_throughput and result.router_throughput.share > 0
    assert repeat.redis_path.lost_chunks == repeat.redis_path.late == 0
    assert repeat.redis_path.barrier_waits == 6
    services = {"producer-0", "consumer-0", "redis", "router", "prometheus"}
    assert repeat.usage.cpu_s.keys() == services | {"bench"}
    assert repeat.usage.gpu is None
    assert repeat.redis_path.store_cpu_s and repeat.redis_path.load_cpu_s
    assert repeat.connector.keys() == {"producer", "consumer"}
    assert all(0 < share < 1 for share in repeat.connector.values()), repeat.connector
    of_engine, of_path = {"queue", "prefill", "decode"}, {"lookup", "load"}
    assert repeat.stages["producer"].keys() - {"load"} == of_engine | {"lookup", "store"}
    assert repeat.stages["consumer"].keys() == of_engine | of_path
    loading = repeat.stages["consumer"]
    assert loading["load"] > 0 and loading["lookup"] > 0
    assert loading["load"] + loading["lookup"] < loading["prefill"]
    lines = list(read_requests(tmp_path))
    assert {(one.input_tokens, one.output_tokens) for one in lines} == {(600, 9)}
    assert result.versions.vllm and result.versions.redis and result.versions.router


def test_conversations_continue_with_the_real_answers(bench: Bench, tmp_path: Path) -> None:
    """What was said before is found in the engines' own caches, so it was sent as it was said."""
    options = "--workload multi-turn --turns 3 --requests 6 --prefix-tokens 640 --rate 20"
    result = bench(*options.split(), "--input-tokens", "64", "--output-tokens", "32")
    (repeat,) = result.repeats
    assert (repeat.completed, repeat.errors, repeat.rate) == (6, {}, 20)
    lengths = sorted(one.input_tokens for one in read_requests(tmp_path))
    assert lengths == [704, 704, 800, 800, 896, 896]
    assert repeat.hits is not None
    # Two turns of two talks on each engine, in whole blocks of 32; the consumer wrote the answers.
    assert repeat.hits.local >= 2 * (704 + 800) + 2 * (704 - 32 + 800 - 32)
    command = ("-m", "check_jsonschema", "--schemafile", str(SCHEMA), str(tmp_path / "result.json"))
    subprocess.run((sys.executable, *command), check=True, timeout=60)


def test_an_interrupted_bench_keeps_its_results_and_a_second_one_is_refused(
    kit: Deploy, tmp_path: Path
) -> None:
    argv = ("bench", "--name", NAME, "--requests", "2", "--repeats", "10000", "--out")
    running = kit.start(*argv, str(tmp_path))
    assert eventually(lambda: (tmp_path / "result.json").exists() or running.poll() is not None)
    second = kit.run("bench", "--name", NAME)
    assert second.code == 3, second
    assert "another deploy bench is running" in second.stderr
    running.send_signal(signal.SIGINT)
    ran = kit.ended(running, timeout_s=60)
    assert ran.code == 130, ran
    assert f"the finished repeats are in {tmp_path}" in ran.stderr
    kept = read_result(tmp_path)
    assert kept.interrupted
    assert len(kept.repeats) >= 1
    assert kit.ok("status", "--name", NAME)["healthy"] is True
