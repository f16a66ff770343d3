"""What the engines counted during one pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deploy.benchmark.results import HitTokens, RedisPathUse, RequestRecord
from deploy.metrics.engine import EXTERNAL_HITS, EXTERNAL_QUERIES, FINISHED, LOCAL_HITS, Latency
from deploy.metrics.page import MetricsPage
from deploy.planning.engines import EnginePlan
from deploy.verify.hits import eligible_tokens
from deploy.verify.store_path import StorePath
from deploy.workflows.running import RunningStack, engine_page, kv_server_page

_PAGE_S = 120.0  # under the highest load
_SETTLE_S = 3.0
_POLL_S = 0.05
_STAGES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
_CPU = "pdkit_store_cpu_seconds_total"  # which earlier versions do not count
_STEPS = "pdkit_store_step_seconds_total"
_SECONDS = "pdkit_store_seconds_total"
_BARRIER = "pdkit_store_barrier_seconds_total"
Pages = Mapping[str, MetricsPage]


def read_pages(running: RunningStack) -> Pages:
    """Return every engine's metrics page, and that of LMCache's server if it answers.

    Raises:
        ApiError: an engine does not answer.
    """
    return {**_engine_pages(running), **kv_server_page(running)}


def _engine_pages(running: RunningStack) -> Pages:
    engines = running.prepared.plan.engines
    with ThreadPoolExecutor(max_workers=len(engines)) as pool:
        pages = pool.map(lambda one: engine_page(running, one.name, timeout_s=_PAGE_S), engines)
        return dict(zip((engine.name for engine in engines), pages, strict=True))


def settled_pages(running: RunningStack, before: Pages, answered: int) -> Pages:
    """Return the pages once engines have counted all answers, or after a timeout.

    Raises:
        ApiError: an engine does not answer.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        pages = _engine_pages(running)
        counted = _total(_counted(running.prepared.plan.consumers, before, pages), FINISHED)
        if counted >= answered or time.monotonic() > deadline:
            return {**pages, **kv_server_page(running)}
        time.sleep(_POLL_S)


def hit_tokens(
    running: RunningStack, before: Pages, after: Pages, records: Sequence[RequestRecord]
) -> HitTokens:
    """Return where the KV of the prompts came from.

    What a consumer held itself is known for all requests together. Where its own cache reaches
    beyond a prompt's last whole chunk, `eligible` is too low by that part, never too high.
    """
    plan = running.prepared.plan
    every = _counted(plan.engines, before, after)
    ends = _counted(plan.consumers, before, after)
    loaded = _total(ends, f"{EXTERNAL_HITS}_total")
    eligible = None
    if any(engine.role == "producer" for engine in plan.engines):
        stored = sum(
            eligible_tokens(one.input_tokens, plan.chunk_size)
            for one in records
            if one.input_tokens
        )
        eligible = max(loaded, stored - _total(ends, f"{LOCAL_HITS}_total"))
    local = _total(every, f"{LOCAL_HITS}_total")
    cached = local + _total(every, f"{EXTERNAL_HITS}_total")
    computed = max(0, _total(every, "vllm:prompt_tokens_total") - cached)
    queried = _total(ends, f"{EXTERNAL_QUERIES}_total")
    return HitTokens(
        external=loaded, eligible=eligible, local=local, computed=computed, queried=queried
    )


def redis_path(running: RunningStack, before: Pages, after: Pages) -> RedisPathUse | None:
    """Return the traffic to and from Redis.

    None where LMCache's own client moves it, or its server did not answer.
    """
    plan = running.prepared.plan
    page = _since(before.keys() & after.keys(), before, after)
    path = StorePath.read(page.samples)
    if path is None:
        return None
    return RedisPathUse(
        stored_bytes=round(path.stored_bytes),
        loaded_bytes=round(path.loaded_bytes),
        store_gb_s=round(path.store_gb_s, 4),
        load_gb_s=round(path.load_gb_s, 4),
        lookups=round(path.lookups),
        lookup_ms=round(path.lookup_ms, 4),
        failures=round(path.failures),
        lost_chunks=round(path.left_out + path.not_loaded + path.refused),
        barrier_waits=round(path.waits),
        barrier_wait_s=round(path.wait_s, 4),
        late=round(path.late),
        store_cpu_s=page.total(_CPU, operation="store"),
        load_cpu_s=page.total(_CPU, operation="load"),
        # The server moves one value of a task after the other, those of all ranks.
        ranks=1 if plan.kv_server else plan.limits.ranks,
        by_server=plan.kv_server is not None,
    )


def stages(running: RunningStack, before: Pages, after: Pages) -> dict[str, dict[str, float]]:
    """Return role → stage → mean seconds of a request there."""
    ranks = running.prepared.plan.limits.ranks
    found: dict[str, dict[str, float]] = {}
    for role, page in _by_role(running, before, after):
        means = {stage: Latency.read(page, name).mean_s for stage, name in _STAGES.items()}
        means |= _store_stages(page, ranks)
        known = {stage: round(mean, 6) for stage, mean in means.items() if mean is not None}
        if known:
            found[role] = known
    return found


def _store_stages(page: MetricsPage, ranks: int) -> dict[str, float | None]:
    """Return the mean wait of a request for Redis; its ranks look up and load in parallel.

    A request does not wait for its stores, only for the barrier.
    """
    requests = Latency.read(page, _STAGES["queue"]).count
    seconds = {
        "lookup": (page.total(_SECONDS, operation="lookup"), ranks),
        "load": (page.total(_SECONDS, operation="load"), ranks),
        "store": (page.total(_BARRIER), 1),
    }
    return {
        stage: total / side_by_side / requests
        for stage, (total, side_by_side) in seconds.items()
        if total is not None and requests
    }


def connector_shares(running: RunningStack, before: Pages, after: Pages) -> dict[str, float]:
    """Return role → the share of its steps' time that engines spent in the connector."""
    return {
        role: round((page.total(_STEPS, part="connector") or 0) / seconds, 6)
        for role, page in _by_role(running, before, after)
        if (seconds := page.total(_STEPS))
    }


def _by_role(
    running: RunningStack, before: Pages, after: Pages
) -> Iterator[tuple[str, MetricsPage]]:
    """Yield each role, and what all engines of it counted."""
    engines = running.prepared.plan.engines
    for role in dict.fromkeys(engine.role for engine in engines):
        mine = [one for one in engines if one.role == role]
        yield role, _counted(mine, before, after)


def _total(page: MetricsPage, name: str) -> int:
    """Return a count; engines without a store lack some."""
    return round(page.total(name) or 0)


def _counted(engines: Sequence[EnginePlan], before: Pages, after: Pages) -> MetricsPage:
    return _since((one.name for one in engines), before, after)


def _since(names: Iterable[str], before: Pages, after: Pages) -> MetricsPage:
    pages = (after[name].since(before[name]) for name in names)
    return sum(pages, MetricsPage())
