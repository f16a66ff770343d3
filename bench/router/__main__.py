"""The kit's router beside vllm-router: latency, throughput and processor time, in turns.

    python -m bench.router --vllm-router PYTHON [--rounds 8] [--requests 1000] [--clients 1 64]
        [--gap-ms 0]

PYTHON is an interpreter with vllm-router 0.1.17. Both routers stand before the same producer and
consumer, which answer at once. They take turns in each round, so that a noisy machine hurts both
alike; the page shows medians over the rounds, and the processor time of each router's process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.kit import ROOT, cpu_s
from bench.router.load import measure

PRODUCER, CONSUMER, OURS, OTHER = 29_010, 29_011, 29_100, 29_200
_START_S = 60.0


@dataclass(frozen=True)
class Round:
    """What one router took for one load."""

    p50_ms: float
    p99_ms: float
    rate: float
    cpu_us: float


def ours(port: int = OURS) -> tuple[str, ...]:
    """Return how the kit's router is started."""
    return (
        sys.executable, "-m", "pdkit_router", "--host", "127.0.0.1", "--port", str(port),
        "--metrics-host", "127.0.0.1", "--metrics-port", str(port + 2),
        "--producer", f"producer=127.0.0.1:{PRODUCER}",
        "--consumer", f"consumer=127.0.0.1:{CONSUMER}",
    )  # fmt: skip


def other(python: str) -> tuple[str, ...]:
    """Return how vllm-router is started."""
    return (
        python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation",
        "--prefill", f"http://127.0.0.1:{PRODUCER}", "--decode", f"http://127.0.0.1:{CONSUMER}",
        "--prefill-policy", "round_robin", "--decode-policy", "round_robin",
        "--port", str(OTHER), "--prometheus-port", str(OTHER + 2),
        "--worker-startup-check-interval", "1", "--log-level", "error",
    )  # fmt: skip


@contextlib.contextmanager
def running(
    argv: tuple[str, ...], port: int, path: str, kit: Path = ROOT, core: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends, once it answers; the router is that of a tree."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{kit / 'deploy' / 'router'}"}
    unheard = None if "BENCH_STDERR" in os.environ else subprocess.DEVNULL
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=unheard, cwd=ROOT)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        until = time.monotonic() + _START_S
        while not _answers(port, path):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(argv[:4])} did not start; BENCH_STDERR=1 shows why")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def one_round(
    port: int, router: subprocess.Popen[bytes], clients: int, requests: int, *, stream: bool
) -> Round:
    """Load one router, and count what its process took."""
    before = cpu_s(router.pid)
    timing = measure(port, clients=clients, requests=requests, stream=stream)
    spent = cpu_s(router.pid) - before
    return Round(
        timing.quantile_ms(0.5), timing.quantile_ms(0.99), timing.rate, 1e6 * spent / requests
    )


def median(rounds: list[Round], name: str) -> float:
    return statistics.median(getattr(one, name) for one in rounds)


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--vllm-router", required=True, help="interpreter with vllm-router")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    options.add_argument("--gap-ms", type=float, default=0.0, help="between tokens of a stream")
    given = options.parse_args()
    engines = (
        sys.executable, "-m", "bench.router.stand_in", str(PRODUCER), str(CONSUMER),
        "--gap-ms", str(given.gap_ms),
    )  # fmt: skip
    print("| clients | answer | router | p50 ms | p99 ms | requests/s | CPU us/request |")
    print("|---|---|---|---|---|---|---|")
    with (
        running(engines, CONSUMER, "/health"),
        running(ours(), OURS, "/readiness") as mine,
        running(other(given.vllm_router), OTHER, "/readiness") as theirs,
    ):
        for clients, stream in itertools.product(given.clients, (False, True)):
            sides = {"pdkit": (OURS, mine, []), "vllm-router": (OTHER, theirs, [])}
            for turn in range(given.rounds):
                names = list(sides) if turn % 2 else list(sides)[::-1]
                for name in names:
                    port, process, rounds = sides[name]
                    rounds.append(one_round(port, process, clients, given.requests, stream=stream))
            for name, (_, _, rounds) in sides.items():
                shown = (median(rounds, column) for column in ("p50_ms", "p99_ms"))
                times = " | ".join(f"{value:.2f}" for value in shown)
                rate, cpu = median(rounds, "rate"), median(rounds, "cpu_us")
                kind = "stream of 32" if stream else "whole"
                print(f"| {clients} | {kind} | {name} | {times} | {rate:.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
