"""The report's sections on what the kit itself costs, and on the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.benchmark.gpu_use import gpu_use
from deploy.benchmark.own_cost import own_cost
from deploy.benchmark.report.cells import number, table
from deploy.benchmark.report.points import StackRuns


def own_cost_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield what the kit adds to a request, where the runs measured it."""
    rows = [row for row in map(_cost_row, runs) if set(row[1:]) != {"-"}]
    if rows:
        yield "<h2>The kit's own cost</h2>"
        yield (
            '<p class="soft">What router and gateway add to a short request; how long the store '
            "barrier holds an answer back; how much CPU time the router takes for a request, "
            "health checks included, and how many requests a second it passes on at least with a "
            "core to itself; the CPU time of the engines' threads that move KV to and from Redis; "
            "the share of the engines' steps that the connector takes (on GPUs, which compute on "
            "after a step's calls, at most); and what <code>deploy up</code> took beyond the "
            "slowest engine's own start.</p>"
        )
        header = (
            "stack", "router p50", "router p99", "store barrier", "router CPU", "router at least",
            "KV stored", "KV loaded", "connector", "deploy up",
        )  # fmt: skip
        yield table(header, rows)


def _cost_row(run: StackRuns) -> Sequence[str]:
    cost = own_cost(run.result)
    p50, p99 = (cost.hop_s.p50, cost.hop_s.p99) if cost.hop_s else (None, None)
    most = cost.router_requests_s
    return (
        run.name,
        *(_ms(one) for one in (p50, p99, cost.barrier_s, cost.router_cpu_s)),
        f"{number(most)}/s" if most else "-",
        *(_per_gb(one) for one in (cost.store_cpu_s_gb, cost.load_cpu_s_gb)),
        ", ".join(f"{role} {100 * share:.1f} %" for role, share in cost.connector.items()) or "-",
        "-" if cost.up_extra_s is None else f"{number(cost.up_extra_s)} s",
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{number(1e3 * seconds)} ms"


def _per_gb(cpu_s: float | None) -> str:
    return "-" if cpu_s is None else f"{number(cpu_s)} CPU s/GB"


def gpu_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield how busy each GPU was, where the runs measured it."""
    rows = [
        (
            run.name,
            gpu,
            "-" if use.utilization is None else f"{100 * use.utilization:.1f} %",
            "-" if use.peak_memory_bytes is None else f"{use.peak_memory_bytes / 2**30:.1f} GiB",
        )
        for run in runs
        for gpu, use in gpu_use(run.result.repeats).items()
    ]
    if rows:
        yield "<h2>GPUs</h2>"
        yield (
            '<p class="soft">The mean share of the time in which a GPU computed, and its peak '
            "memory use.</p>"
        )
        yield table(("stack", "GPU", "computes", "peak memory"), rows)
