"""Real answers, given again slower by a known factor, which `deploy bench` and `compare` find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.benchmark.workloads import TokenRange, WorkloadOptions
from deploy.runtime.home import Home
from deploy.workflows.bench import BenchOptions, bench_stack
from deploy.workflows.bench.passes import BenchSession
from tests.e2e.conftest import Deploy
from tests.e2e.one_stack.conftest import NAME, PORT
from tests.e2e.one_stack.slow_proxy import SlowProxy, slow_proxy

# More than what the lengths of requests explain.
FACTOR = 3
# Lengths differ from repeat to repeat, and so do latencies: the intervals are wide enough for a
# machine that is late by a tenth of a second each time.
WORKLOAD = WorkloadOptions(input_tokens=TokenRange(450, 1150), output_tokens=TokenRange(4, 4))
OPTIONS = BenchOptions(
    WORKLOAD, concurrency=1, requests=3, repeats=5, warmup=0, hop_requests=0, router_requests=0,
    one_user_requests=0,
)  # fmt: skip
LATENCIES = ("TTFT p50", "end to end p50")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowProxy]:
    """Return a proxy that `bench_stack` takes for the router."""
    with slow_proxy(PORT) as found:

        def session(*given: Any) -> BenchSession:
            made = BenchSession(*given)
            made.target = replace(made.target, url=f"http://127.0.0.1:{found.port}")
            return made

        monkeypatch.setattr("deploy.workflows.bench.run.BenchSession", session)
        yield found


def measured(kit: Deploy, folder: Path) -> Path:
    folder.mkdir()
    home, command = Home(kit.home, kit.home / "cache"), ["deploy", "bench"]
    found = bench_stack(home, NAME, OPTIONS, folder=folder, command=command, report=lambda _: None)
    assert [(one.completed, one.failed) for one in found.repeats] == [(3, 0)] * 5
    return folder


def test_the_factor_is_in_the_interval_and_the_same_stack_twice_does_not_differ(
    kit: Deploy, proxy: SlowProxy, tmp_path: Path
) -> None:
    measured(kit, tmp_path / "the engines")
    proxy.again(1)
    first = measured(kit, tmp_path / "first")
    proxy.again(FACTOR)
    slower = measured(kit, tmp_path / "slower")
    proxy.again(FACTOR)
    again = measured(kit, tmp_path / "again")
    for name, row in compared(kit, first, slower).items():
        ratio = row["ratio"]
        assert 1 < ratio["low"] <= FACTOR <= ratio["high"] < 2 * FACTOR, (name, row)
        assert row["verdict"] == "worse", name
    verdicts = {row["verdict"] for row in compared(kit, slower, again).values()}
    assert verdicts == {"no significant difference"}


def compared(kit: Deploy, first: Path, second: Path) -> dict[str, Any]:
    (point,) = kit.ok("bench", "compare", str(first), str(second))["points"]
    return {row["metric"]: row for row in point["metrics"] if row["metric"] in LATENCIES}
