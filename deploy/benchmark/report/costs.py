"""The report's sections on the Redis path, the kit's own cost, and what services and GPUs used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from deploy.benchmark.own_cost import gpu_use, own_cost, service_use
from deploy.benchmark.report.chart_data import Point, StackRuns
from deploy.benchmark.report.tables import number, percent, short, table
from deploy.benchmark.results import RouterThroughput


def redis_path_section(found: Sequence[Point]) -> Iterator[str]:
    """Yield the speed of KV to and from Redis, for runs that moved some."""
    rows = [row for row in map(_path_row, found) if row]
    if rows:
        yield "<h2>Redis path</h2>"
        yield (
            '<p class="soft">KV that all engines stored and loaded, in all repeats at a load. The '
            "speeds are medians of the repeats: of stores by the time of one connection, of which "
            "an engine has several; of loads by the time of a prompt, on each rank.</p>"
        )
        header = (
            "stack", "load", "stored", "store speed", "loaded", "load speed", "a lookup",
            "lost chunks", "late answers",
        )  # fmt: skip
        yield table(header, rows, "loads")


def _path_row(point: Point) -> Sequence[str] | None:
    paths = [one.redis_path for one in point.repeats if one.redis_path]
    if not paths:
        return None
    lookups = [one.lookup_ms for one in paths if one.lookups]
    return (
        point.run.name,
        short(point.load),
        *_moved([(one.stored_bytes, one.store_gb_s) for one in paths]),
        *_moved([(one.loaded_bytes, one.load_gb_s) for one in paths]),
        f"{number(median(lookups))} ms" if lookups else "-",
        str(sum(one.lost_chunks for one in paths)),
        str(sum(one.late for one in paths)),
    )


def _moved(paths: Sequence[tuple[int, float]]) -> tuple[str, str]:
    """Return the bytes of all repeats, and the median speed of those that moved some."""
    speeds = [speed for size, speed in paths if size]
    total = f"{number(sum(size for size, _ in paths) / 1e6)} MB"
    return total, f"{number(median(speeds))} GB/s" if speeds else "-"


def own_cost_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield the kit's own share of a request, if the runs measured it."""
    rows = [row for row in map(_cost_row, runs) if set(row[1:]) != {"-"}]
    if rows:
        yield "<h2>The kit's own cost</h2>"
        yield (
            '<p class="soft">What the router adds to a short request; how much CPU time the '
            "router takes for a request, health checks included, and how many requests a second it "
            "passes on at least with a core to itself; how many short requests a second are "
            "answered by the router, beside the same engines asked directly. Below: how long the "
            "store barrier holds an answer back; the CPU time of the engines' threads that move KV "
            "to and from Redis; the share of the engines' steps that the connector takes (on GPUs, "
            "which compute on after a step's calls, at most); and what <code>deploy up</code> took "
            "beyond the slowest engine's own start.</p>"
        )
        yield table(("stack", *_ROUTER), [(row[0], *row[1 : 1 + len(_ROUTER)]) for row in rows])
        yield table(("stack", *_KV), [(row[0], *row[1 + len(_ROUTER) :]) for row in rows])


_ROUTER = ("router p50", "router p99", "router CPU", "router at least", "by router and directly")
_KV = ("store barrier", "KV stored", "KV loaded", "connector", "deploy up")


def _cost_row(run: StackRuns) -> Sequence[str]:
    cost = own_cost(run.result)
    p50, p99 = (cost.hop_s.p50, cost.hop_s.p99) if cost.hop_s else (None, None)
    most = cost.router_requests_s
    return (
        run.name,
        *(_ms(one) for one in (p50, p99, cost.router_cpu_s)),
        f"{number(most)}/s" if most else "-",
        _throughput(cost.throughput),
        _ms(cost.barrier_s),
        *(_per_gb(one) for one in (cost.store_cpu_s_gb, cost.load_cpu_s_gb)),
        ", ".join(f"{role} {percent(share)}" for role, share in cost.connector.items()) or "-",
        "-" if cost.up_extra_s is None else f"{number(cost.up_extra_s)} s",
    )


def _throughput(found: RouterThroughput | None) -> str:
    if found is None:
        return "-"
    routed, direct = number(found.routed_per_s), number(found.direct_per_s)
    return f"{routed}/s of {direct}/s ({100 * found.share:.0f} %)"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{number(1e3 * seconds)} ms"


def _per_gb(cpu_s: float | None) -> str:
    return "-" if cpu_s is None else f"{number(cpu_s)} CPU s/GB"


def usage_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield the CPU, memory and GPU use of each service, if the runs measured it."""
    services = [
        (run.name, name, number(use.cores), _gib(use.peak_rss_bytes))
        for run in runs
        for name, use in service_use(run.result.repeats).items()
    ]
    if services:
        yield "<h2>CPU and memory</h2>"
        yield (
            '<p class="soft">The mean number of cores that a service used over all repeats, and '
            "the most memory that it held. <code>bench</code> is the load generator.</p>"
        )
        yield table(("stack", "service", "cores", "peak memory"), services, "loads")
    gpus = [
        (
            run.name,
            gpu,
            percent(use.utilization),
            _gib(use.peak_memory_bytes),
        )
        for run in runs
        for gpu, use in gpu_use(run.result.repeats).items()
    ]
    if gpus:
        yield "<h2>GPUs</h2>"
        yield (
            '<p class="soft">The mean share of the time in which a GPU computed, and its peak '
            "memory use.</p>"
        )
        yield table(("stack", "GPU", "computes", "peak memory"), gpus)


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"
