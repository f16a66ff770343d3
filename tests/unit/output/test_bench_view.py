"""What people read of a benchmark: every number that a decision needs, and per GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.benchmark.sweep import judged
from deploy.output.bench_view import bench_view, dry_run_view, sweep_view
from tests.unit.benchmark.samples import repeat, result
from tests.unit.benchmark.test_break_even import PATH, measured
from tests.unit.benchmark.test_sweep import run, sweep, times

USAGE: dict[str, Any] = {"cpu_s": {}, "peak_rss_bytes": {}}


def shown(**changed: Any) -> str:
    return bench_view(result(**changed), "/the/folder")


def test_every_repeat_has_its_latencies() -> None:
    text = shown(repeats=[repeat(0), repeat(1, ttft_s=None)])
    rows = [line.split() for line in text.splitlines() if " TTFT " in line]
    assert rows[0] == ["1", "2.00", "TTFT", "100.0", "200.0", "300.0", "120.0"]
    assert rows[1] == ["2", "2.00", "TTFT", "-", "-", "-", "-"]
    assert "2.00 offered" in text
    assert text.endswith("Result: /the/folder")


def test_throughput_is_divided_by_all_engines_or_gpus() -> None:
    assert "for each of 2 engines 1.00, 1000 and 16" in shown()
    stack = {**result().stack.model_dump(), "gpus": 8}
    assert "for each of 8 GPUs 0.25, 250 and 4" in shown(stack=stack)


def test_hit_rates_are_shown() -> None:
    lost = {"external": 450, "eligible": 900, "local": 7, "computed": 1550, "queried": 1250}
    assert "external hit rate 60.0 %," in shown(repeats=[repeat(0), repeat(1, hits=lost)])
    assert "external hit rate not known" in shown(repeats=[repeat(hits={**lost, "queried": None})])
    assert "external hit rate not known" in shown(repeats=[repeat(hits={**lost, "queried": 0})])
    assert "eligible hit rate 75.0 %" in shown(repeats=[repeat(0), repeat(1, hits=lost)])
    assert "eligible hit rate not known" in shown(repeats=[repeat(hits={**lost, "eligible": None})])


def test_losses_of_the_redis_path_are_shown() -> None:
    path = {
        "stored_bytes": 10**7, "loaded_bytes": 2 * 10**7, "store_gb_s": 0.5, "load_gb_s": 0.8,
        "lookups": 20, "lookup_ms": 0.4, "failures": 0, "lost_chunks": 0, "barrier_waits": 10,
        "barrier_wait_s": 0.05, "late": 0,
    }  # fmt: skip
    text = shown(repeats=[repeat(redis_path=path)])
    assert "stored 10.0 MB at 0.50 GB/s, loaded 20.0 MB at 0.80 GB/s" in text
    assert "held an answer back for 5.0 ms; nothing lost or late" in text
    text = shown(repeats=[repeat(redis_path={**path, "lost_chunks": 3, "late": 1})])
    assert text.count("3 chunks lost, 1 answers sent before their KV") == 1


def test_cpu_time_of_the_hand_off() -> None:
    """Of all repeats that counted it; a repeat of an older version did not."""
    counted = PATH | {"store_cpu_s": 0.2, "load_cpu_s": 0.5, "loaded_bytes": 2 * 10**9}
    other = counted | {"store_cpu_s": 0.4, "load_cpu_s": 1.1}
    paths = [counted, other, PATH]
    text = shown(repeats=[repeat(at, redis_path=path) for at, path in enumerate(paths)])
    assert "KV hand-off: 0.30 CPU s/GB stored, 0.40 CPU s/GB loaded" in text
    unmoved = counted | {"loaded_bytes": 0}
    assert "KV hand-off: 0.20 CPU s/GB stored\n" in shown(repeats=[repeat(redis_path=unmoved)])
    assert "KV hand-off" not in shown(repeats=[repeat(redis_path=PATH)])


def test_share_of_the_connector_is_the_median_of_the_repeats() -> None:
    shares = ({"producer": share, "consumer": 2 * share} for share in (0.03, 0.5, 0.04))
    repeats = [repeat(at, connector=share) for at, share in enumerate(shares)]
    said = "Connector: takes 4.0 % of producers', 8.0 % of consumers' steps"
    assert said in shown(repeats=[*repeats, repeat(3)])
    alone = repeat(connector={"aggregated": 0.02})
    assert "Connector: takes 2.0 % of aggregated engines' steps" in shown(repeats=[alone])
    assert "Connector" not in shown()


def test_the_extra_time_of_up_is_shown() -> None:
    assert "Start: deploy up took 3.2 s beyond the slowest engine's own start" in shown(
        up_extra_s=3.24
    )
    assert "deploy up" not in shown()


def test_use_of_gpus_over_all_repeats() -> None:
    """A repeat counts by its duration."""

    def used(**gpus: tuple[float | None, int | None]) -> dict[str, Any]:
        use = {
            gpu.removeprefix("gpu"): {"utilization": share, "peak_memory_bytes": peak}
            for gpu, (share, peak) in gpus.items()
        }
        return {"usage": USAGE | {"gpu": use}}

    short = repeat(0, duration_s=10.0, **used(gpu10=(0.9, 1 << 30), gpu2=(None, 3 << 30)))
    long = repeat(1, duration_s=30.0, **used(gpu10=(0.5, 6 << 30)))
    text = shown(repeats=[short, long, repeat(2)])
    assert "GPUs in use: GPU 2 up to 3.0 GiB; GPU 10 60.0 % of the time, up to 6.0 GiB" in text
    assert "GPUs in use" not in shown()


def test_slo_and_search_are_shown() -> None:
    search = {
        "required_share": 0.9, "highest_rate": 4.0, "low": 3.5, "high": None,
        "steps": [{"rate": 4.0, "within_slo": 0.95, "held": True}],
    }  # fmt: skip
    repeats = [repeat(0), repeat(1, within_slo=0.5)]
    said = "SLO ttft 1000 ms: 50.0 % to 100.0 % of requests within it; goodput 2.00 requests/s, "
    assert f"{said}1.00 for each of 2 engines\n" in shown(repeats=repeats)
    on_gpus = {**result().stack.model_dump(), "gpus": 8}
    assert f"{said}0.25 for each of 8 GPUs\n" in shown(repeats=repeats, stack=on_gpus)
    text = shown(repeats=repeats, rate_search=search)
    assert "Throughput" not in text  # of rates that differ there is no median
    found = "4.00 requests/s (95 % interval 3.50 to ?), 2.00 for each of 2 engines"
    assert f"for 90.0 % of requests: {found}" in text
    assert "No rate that was tried holds" in shown(
        rate_search={**search, "highest_rate": None, "low": None}
    )


def test_failures_are_counted_by_their_text() -> None:
    errors = {"HTTP 500: out of order": 2}
    text = shown(repeats=[repeat(0, errors=errors), repeat(1, errors=errors)])
    assert "Failed, 4 requests: HTTP 500: out of order" in text


def test_the_cost_of_the_router_is_shown() -> None:
    hop = {"p50": 0.0012, "p90": 0.002, "p99": 0.0055, "mean": 0.0015}
    assert "Router: adds 1.2 ms to a request (p50), 5.5 ms (p99)\n" in shown(hop_s=hop)
    used = [repeat(at, usage=USAGE | {"cpu_s": {"router": 0.05}}) for at in range(2)]
    least = (
        "takes 2.50 ms of CPU time for one, health checks included; with a core to itself it "
        "passes on at least 400 requests/s"
    )
    assert f"Router: {least}" in shown(repeats=used)
    assert f"5.5 ms (p99); {least}" in shown(repeats=used, hop_s=hop)
    assert "Router" not in shown()


def test_throughput_by_the_router_beside_the_engines_own() -> None:
    found = {"in_flight": 8, "routed_per_s": 57.0, "direct_per_s": 60.0}
    said = (
        "Router: with 8 short requests in flight, 57 answers/s through it and 60 directly "
        "(95.0 %)\n"
    )
    assert said in shown(router_throughput=found)


def test_router_without_a_tick_of_cpu_time_has_no_limit() -> None:
    idle = repeat(usage=USAGE | {"cpu_s": {"router": 0.0}})
    assert "Router" not in shown(repeats=[idle])


def test_open_and_closed_loops_are_shown() -> None:
    assert "Poisson arrivals" in shown()
    assert "4 in flight" in shown(repeats=[repeat(rate=None, concurrency=4)])


def test_the_break_even_length_is_shown() -> None:
    # Prefill makes 1,000 tokens/s of 4,096 bytes; a lookup takes 2 ms, less than a chunk is worth.
    said = "loading KV is faster than computing it from 256 tokens on (prefill 1000 tokens/s"
    assert said in shown(repeats=[measured()])
    alone = measured(rate=None, concurrency=1, prefill_s=0.011)
    text = shown(repeats=[measured()], one_user=alone)
    assert "Break-even: with one request at a time, loading KV is faster than computing" in text
    assert "prefill 5000 tokens/s, which is 0.02 GB/s of KV; loaded at 0.8 GB/s)" in text
    slow = measured(redis_path=PATH | {"load_gb_s": 0.004})
    assert "computing it for no length" in shown(repeats=[slow])
    assert "Break-even" not in shown()


def test_a_dry_run_lists_the_runs_and_their_time() -> None:
    planned = sweep({"4a": [], "1p3d": []}, rounds=1, refused={"1a:tp4": "4 does not divide"})
    lines = dry_run_view(planned, 120).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["1", "of", "1", "4a"],
        ["1", "of", "1", "1p3d"],
    ]
    assert lines[-2] == "left out: 1a:tp4: 4 does not divide"
    assert lines[-1].startswith("2 runs, about 2 min")


def test_the_best_comes_first_and_a_failure_has_its_reason() -> None:
    found = sweep({"4a": times(10), "1p3d": times(14)[::-1], "2p2d": []})
    found = found.model_copy(update={"runs": [*found.runs, run("2p2d", 0, None, "it exited")]})
    found = judged(found)
    lines = sweep_view(found, Path("/r"), Path("/r/best.yaml"), "/r/report.html").splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1p3d", "4a", "2p2d"]
    assert "2p2d: it exited" in lines
    assert lines[-4].startswith("1p3d holds 1.4")
    assert lines[-2] == "Report: /r/report.html"
    assert lines[-1] == "Start it: deploy up -f /r/best.yaml"
