"""Benchmark results, sweeps and comparisons as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.compare import Comparison, MetricRow, UnlikeField
from deploy.benchmark.compare_sweeps import ComparedSweeps, ComparedTopology
from deploy.benchmark.facts import StackFacts
from deploy.benchmark.own_cost import OwnCost, gpu_use, own_cost, service_use
from deploy.benchmark.results import Percentiles, RateSearch, Repeat, Result, hit_rate
from deploy.benchmark.statistics import Estimate
from deploy.benchmark.sweep import Sweep, TopologyRow, rows
from deploy.output.table import duration, percent, table
from deploy.planning.break_even import break_even_tokens

_SCALE: dict[str, tuple[float, str]] = {"ms": (1e3, " ms"), "1/s": (1, "/s"), "%": (100, " %")}


@dataclass(frozen=True)
class Bench:
    """A benchmark run.

    Attributes:
        folder: where its files are.
        report: the page; null if it could not be written.
    """

    folder: str
    report: str | None
    result: Result


@dataclass(frozen=True)
class LeftRun:
    """A run that is still to come."""

    round: int
    topology: str


@dataclass(frozen=True)
class SweepPlan:
    """`deploy bench sweep --dry-run`.

    Attributes:
        refused: topology → why it cannot be measured here.
        seconds: an estimate.
    """

    runs: Sequence[LeftRun]
    refused: Mapping[str, str]
    seconds: int


@dataclass(frozen=True)
class SweepDone:
    """A finished sweep.

    Attributes:
        best: the file for `deploy up -f`; null if no topology is best.
    """

    folder: str
    report: str | None
    best: str | None
    sweep: Sweep


def bench_view(result: Result, folder: str) -> str:
    """Return the latencies of all repeats as a table, and below it what else was counted."""
    stack, repeats = result.stack, result.repeats
    rows = [row for repeat in repeats for row in _rows(repeat)]
    header = ("repeat", "requests/s", "what", "p50 ms", "p90 ms", "p99 ms", "mean ms")
    return "\n".join(
        [
            f"{stack.topology}, {result.model.name}, workload {result.workload.name}, "
            f"{_how(repeats[0])}, seed {result.seed}",
            "",
            table(header, rows, right=header[3:]),
            "",
            *(() if result.rate_search else _throughput(result)),
            *_hits(repeats),
            *_path(repeats),
            *_usage(repeats),
            *_gpus(repeats),
            *_own_cost(own_cost(result)),
            *_break_even(result),
            *(_search(result.rate_search, stack) if result.rate_search else _slo(result)),
            *_errors(repeats),
            "",
            f"Result: {folder}",
        ]
    )


def _how(repeat: Repeat) -> str:
    if repeat.concurrency is not None:
        return f"{repeat.concurrency} in flight"
    return "Poisson arrivals" if repeat.rate is not None else "at the trace's times"


def _rows(repeat: Repeat) -> Iterator[tuple[object, ...]]:
    shown = (("TTFT", repeat.ttft_s), ("ITL", repeat.itl_s), ("end to end", repeat.e2e_s))
    offered = f"{repeat.rate:.2f} offered" if repeat.rate is not None else ""
    for index, (name, values) in enumerate(shown):
        first = (repeat.index + 1, f"{repeat.requests_per_s:.2f}") if not index else ("", "")
        if index == 1:
            first = ("", offered)
        yield (*map(str, first), name, *_milliseconds(values))


def _milliseconds(values: Percentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("-",) * 4
    return tuple(f"{1e3 * one:.1f}" for one in (values.p50, values.p90, values.p99, values.mean))


def _throughput(result: Result) -> Iterator[str]:
    repeats, stack = result.repeats, result.stack
    units = stack.units
    requests, prompt, answer = (
        median(values)
        for values in (
            [one.requests_per_s for one in repeats],
            [one.input_tokens_per_s for one in repeats],
            [one.output_tokens_per_s for one in repeats],
        )
    )
    yield (
        f"Throughput (median): {requests:.2f} requests/s, {prompt:.0f} input and {answer:.0f} "
        f"output tokens/s; for each of {units} {stack.unit}s {requests / units:.2f}, "
        f"{prompt / units:.0f} and {answer / units:.0f}"
    )


def _hits(repeats: Sequence[Repeat]) -> Iterator[str]:
    hits = [one.hits for one in repeats if one.hits]
    if not hits:
        return
    external, local, computed = (
        sum(getattr(one, name) for one in hits) for name in ("external", "local", "computed")
    )
    rates = (hit_rate(hits, "queried"), hit_rate(hits, "eligible"))
    external_rate, eligible_rate = (
        "not known" if rate is None else percent(rate) for rate in rates
    )
    yield (
        f"Prompt tokens: {external} loaded from the store, {local} found in engines' own caches, "
        f"{computed} computed; external hit rate {external_rate}, eligible hit rate {eligible_rate}"
    )


def _path(repeats: Sequence[Repeat]) -> Iterator[str]:
    paths = [one.redis_path for one in repeats if one.redis_path]
    if not paths:
        return
    waits = sum(one.barrier_waits for one in paths)
    waited = 1e3 * sum(one.barrier_wait_s for one in paths) / waits if waits else 0.0
    trouble = {
        "chunks lost": sum(one.lost_chunks for one in paths),
        "failures": sum(one.failures for one in paths),
        "answers sent before their KV": sum(one.late for one in paths),
    }
    wrong = ", ".join(f"{count} {what}" for what, count in trouble.items() if count)
    yield (
        f"Redis path: stored {sum(one.stored_bytes for one in paths) / 1e6:.1f} MB at "
        f"{median(one.store_gb_s for one in paths):.2f} GB/s, loaded "
        f"{sum(one.loaded_bytes for one in paths) / 1e6:.1f} MB at "
        f"{median(one.load_gb_s for one in paths):.2f} GB/s, looked up in "
        f"{median(one.lookup_ms for one in paths):.1f} ms; the store barrier held an answer back "
        f"for {waited:.1f} ms; {wrong or 'nothing lost or late'}"
    )


def _usage(repeats: Sequence[Repeat]) -> Iterator[str]:
    used = service_use(repeats)
    if not used:
        return
    cores = (f"{name} {one.cores:.2f}" for name, one in used.items())
    yield f"CPU cores in use: {', '.join(cores)}"
    held = (
        f"{name} {one.peak_rss_bytes / 2**30:.2f}"
        for name, one in used.items()
        if one.peak_rss_bytes
    )
    yield f"Peak memory in GiB: {', '.join(held)}"


def _gpus(repeats: Sequence[Repeat]) -> Iterator[str]:
    said = []
    for gpu, use in gpu_use(repeats).items():
        busy = "" if use.utilization is None else f" {percent(use.utilization)} of the time"
        peak = use.peak_memory_bytes
        held = "" if peak is None else f"{',' if busy else ''} up to {peak / 2**30:.1f} GiB"
        said.append(f"GPU {gpu}{busy}{held}")
    if said:
        yield f"GPUs in use: {'; '.join(said)}"


def _own_cost(cost: OwnCost) -> Iterator[str]:
    yield from _router(cost)
    moved = {"stored": cost.store_cpu_s_gb, "loaded": cost.load_cpu_s_gb}
    if known := [f"{used:.2f} CPU s/GB {how}" for how, used in moved.items() if used is not None]:
        yield f"KV hand-off: {', '.join(known)}"
    if cost.connector:
        shares = (f"{percent(share)} of {_whose(role)}" for role, share in cost.connector.items())
        yield f"Connector: takes {', '.join(shares)} steps"
    if cost.up_extra_s is not None:
        yield f"Start: deploy up took {cost.up_extra_s:.1f} s beyond the slowest engine's own start"


def _whose(role: str) -> str:
    return "aggregated engines'" if role == "aggregated" else f"{role}s'"


def _router(cost: OwnCost) -> Iterator[str]:
    said = []
    if hop := cost.hop_s:
        said.append(f"adds {1e3 * hop.p50:.1f} ms to a request (p50), {1e3 * hop.p99:.1f} ms (p99)")
    if cost.router_cpu_s and cost.router_requests_s:
        said.append(
            f"takes {1e3 * cost.router_cpu_s:.2f} ms of CPU time for one, health checks included; "
            f"with a core to itself it passes on at least {cost.router_requests_s:.0f} requests/s"
        )
    if found := cost.throughput:
        said.append(
            f"with {found.in_flight} short requests in flight, {found.routed_per_s:.0f} answers/s "
            f"through it and {found.direct_per_s:.0f} directly ({percent(found.share)})"
        )
    if said:
        yield f"Router: {'; '.join(said)}"


def _break_even(result: Result) -> Iterator[str]:
    """Say from which prompt length loading KV beats computing it, for one user and under load."""
    for load, speeds in speeds_at_ends(result).items():
        tokens = break_even_tokens(speeds)
        from_there = f"from {tokens} tokens on" if tokens else "for no length"
        yield (
            f"Break-even: with {load}, loading KV is faster than computing it {from_there} "
            f"(prefill {speeds.prefill_tokens_s:.0f} tokens/s, which is "
            f"{speeds.computed_gb_s:.2g} GB/s of KV; loaded at {speeds.load_gb_s:.2g} GB/s)"
        )


def _slo(result: Result) -> Iterator[str]:
    slo, repeats = result.slo, result.repeats
    if slo is None:
        return
    limits = ", ".join(
        f"{name.removesuffix('_s')} {1e3 * limit:g} ms"
        for name, limit in slo.model_dump().items()
        if limit is not None
    )
    shares = [one.within_slo for one in repeats if one.within_slo is not None]
    goodput = [one.goodput_per_s for one in repeats if one.goodput_per_s is not None]
    yield (
        f"SLO {limits}: {percent(min(shares))} to {percent(max(shares))} of requests within it; "
        f"goodput {median(goodput):.2f} requests/s, {_each(median(goodput), result.stack)}"
    )


def _each(rate: float, stack: StackFacts) -> str:
    return f"{rate / stack.units:.2f} for each of {stack.units} {stack.unit}s"


def _search(search: RateSearch, stack: StackFacts) -> Iterator[str]:
    share = percent(search.required_share)
    if search.highest_rate is None:
        yield f"No rate that was tried holds the SLO for {share} of requests"
        return
    low = "?" if search.low is None else f"{search.low:.2f}"
    high = "?" if search.high is None else f"{search.high:.2f}"
    yield (
        f"Highest rate that holds the SLO for {share} of requests: {search.highest_rate:.2f} "
        f"requests/s (95 % interval {low} to {high}), {_each(search.highest_rate, stack)}"
    )


def _errors(repeats: Sequence[Repeat]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for repeat in repeats:
        for text, count in repeat.errors.items():
            counts[text] = counts.get(text, 0) + count
    for text, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"Failed, {count} requests: {text}"


def dry_run_view(sweep: Sweep, left_s: float) -> str:
    """Return the runs that are left and the time they will take."""
    runs = [(f"{number + 1} of {sweep.rounds}", name) for name, number in sweep.left]
    lines = [table(("round", "topology"), runs), ""]
    lines += [f"left out: {name}: {why}" for name, why in sweep.refused.items()]
    lines.append(f"{len(runs)} runs, about {duration(left_s)}; nothing was started")
    return "\n".join(lines)


def sweep_view(sweep: Sweep, folder: Path, best: Path | None, page: str | None) -> str:
    """Return the topologies, the best first, and the verdict."""
    header = ("topology", f"{sweep.unit}s", "rounds", "requests/s", f"per {sweep.unit}", "95 %")
    found = rows(sweep)
    lines = [
        table(header, [_cells(row) for row in found], right=header[1:]),
        *(f"{row.topology}: {row.why_not}" for row in found if row.why_not),
        "",
    ]
    if sweep.verdict:
        lines.append(sweep.verdict.sentence)
    lines.append(f"Results: {folder}")
    if page:
        lines.append(f"Report: {page}")
    if best:
        lines.append(f"Start it: deploy up -f {best}")
    return "\n".join(lines)


def _cells(row: TopologyRow) -> tuple[object, ...]:
    interval = "-" if row.low is None else f"{row.low:.2f} to {row.high:.2f}"
    return (
        row.topology,
        row.units,
        row.rounds,
        "-" if row.rate is None else f"{row.rate:.2f}",
        "-" if row.per_unit is None else f"{row.per_unit:.2f}",
        interval,
    )


def compare_view(comparison: Comparison, first: Result, second: Result) -> str:
    """Return a table for each load, and below them what to know about them."""
    lines = [f"A  {_run(first)}", f"B  {_run(second)}"]
    lines += _differing(comparison.unlike)
    header = ("metric", "A", "B", "B / A", "95 % interval", "B is")
    for one in comparison.points:
        compared = one.metrics
        shown = [tuple(_compared_cells(row)) for row in compared]
        counted = _counted(compared[0].first, compared[0].second)
        lines += [
            "",
            f"At {one.load}, medians of the repeats ({counted}):",
            "",
        ]
        lines.append(table(header, shown, right=header[1:5]))
    return "\n".join([*lines, "", *comparison.notes])


def sweeps_view(comparison: ComparedSweeps, first: Sweep, second: Sweep) -> str:
    """Return a table of the topologies, below what each sweep said itself."""
    what = f"Highest rate that holds {first.slo}" if first.slo else "Throughput"
    header = ("topology", "A", "B", "B / A", "95 % interval", "rounds", "B is")
    found = [_topology(one) for one in comparison.topologies]
    return "\n".join(
        [
            f"A  {_sweep(first)}",
            f"B  {_sweep(second)}",
            *_differing(comparison.unlike),
            "",
            f"{what}, in requests/s, medians of the rounds:",
            "",
            table(header, found, right=header[1:6]),
            "",
            *comparison.notes,
        ]
    )


def _sweep(sweep: Sweep) -> str:
    sent = f"{sweep.workload.name}, " if sweep.workload else ""
    said = f": {sweep.verdict.sentence}" if sweep.verdict else ""
    return f"{sent}{sweep.started}{said}"


def _topology(one: ComparedTopology) -> tuple[str, ...]:
    rounds = _counted(one.first, one.second)
    return (
        one.topology, f"{one.first.value:.2f}", f"{one.second.value:.2f}",
        f"{one.ratio.value:.2f}", interval(one.ratio), rounds, one.verdict,
    )  # fmt: skip


def _differing(unlike: Sequence[UnlikeField]) -> list[str]:
    return [f"differs: {one.field}: {one.first} and {one.second}" for one in unlike]


def interval(estimate: Estimate | None) -> str:
    """Return the ends of a ratio's interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.low:.2f} to {estimate.high:.2f}"


def _run(result: Result) -> str:
    return f"{result.stack.topology}, {result.model.name}, {result.workload.name}, {result.started}"


def _counted(first: Estimate, second: Estimate) -> str:
    same = first.repeats == second.repeats
    return str(first.repeats) if same else f"{first.repeats} and {second.repeats}"


def _compared_cells(row: MetricRow) -> Iterator[str]:
    factor, unit = _SCALE[row.unit]
    yield row.metric
    for side in (row.first, row.second):
        yield f"{factor * side.value:.4g}{unit}"
    yield f"{row.ratio.value:.2f}" if row.ratio else "-"
    yield interval(row.ratio)
    yield row.verdict
