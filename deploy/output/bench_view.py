"""A benchmark's result as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.facts import StackFacts
from deploy.benchmark.own_cost import OwnCost, own_cost
from deploy.benchmark.results import Percentiles, RateSearch, Repeat, Result, hit_rate
from deploy.benchmark.usage import gpu_use, service_use
from deploy.output.table import percent, table
from deploy.planning.break_even import break_even_tokens


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
        "answers before their KV": sum(one.late for one in paths),
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
            f"with {found.in_flight} short requests in flight, {found.routed_per_s:.0f} a second "
            f"are answered by it and {found.direct_per_s:.0f} directly ({percent(found.share)})"
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
