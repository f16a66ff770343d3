"""What the router adds to a request, and how many it passes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from deploy.benchmark.load import LoadTarget, run_load, run_routes
from deploy.benchmark.results import Percentiles, RouterThroughput
from deploy.benchmark.summary import percentiles
from deploy.benchmark.workloads import Conversation, PassSource, TokenRange, WorkloadOptions
from deploy.planning.engines import EnginePlan
from deploy.runtime.engine_api import bearer
from deploy.workflows.running import RunningStack

# Too short for a chunk, so that no KV moves.
_SHORT = WorkloadOptions("random", TokenRange(16, 16), TokenRange(1, 1))
_IN_FLIGHT = 4  # for each engine
_ROUNDS = 3


def measure_hop(
    running: RunningStack, front: LoadTarget, tokens: Sequence[int], requests: int
) -> Percentiles | None:
    """Return the time that the router adds to short requests.

    Each is compared with the same work done directly: by a producer and a consumer, or by one
    aggregated engine. None if a request failed, or none is wanted.
    """
    engines = _routes(running, front)[0]
    found = []
    for one in PassSource(_SHORT, tokens).one_pass(requests, seed="hop", rate=None):
        through = _seconds(front, one)
        direct = [_seconds(engine, one) for engine in engines]
        if through is None or None in direct:
            return None
        found.append(through - sum(took for took in direct if took is not None))
    return percentiles(found)


def measure_throughput(
    running: RunningStack, front: LoadTarget, tokens: Sequence[int], requests: int
) -> RouterThroughput | None:
    """Return the rates of short requests through the router, and directly.

    Both keep all engines busy. They take turns, so that what changes on the machine meets both
    alike. None if a request failed, or none is wanted.
    """
    in_flight = _IN_FLIGHT * len(running.prepared.plan.engines)
    source = PassSource(_SHORT, tokens)

    def rate(routes: Sequence[Sequence[LoadTarget]]) -> float | None:
        short = source.one_pass(requests, seed="throughput", rate=None)
        load = run_routes(routes, short, concurrency=in_flight)
        failed = any(one.error is not None for one in load.records)
        return None if failed or not short else len(short) / load.duration_s

    direct = _routes(running, front)
    rounds = [(rate([[front]]), rate(direct)) for _ in range(_ROUNDS)]
    known = [(routed, alone) for routed, alone in rounds if routed and alone]
    if len(known) < len(rounds):
        return None
    return RouterThroughput(
        in_flight=in_flight,
        routed_per_s=round(median(routed for routed, _ in known), 2),
        direct_per_s=round(median(alone for _, alone in known), 2),
    )


def _routes(running: RunningStack, front: LoadTarget) -> list[list[LoadTarget]]:
    """Return the engines that serve a request, in order; as many routes as use all engines."""
    by_role: dict[str, list[LoadTarget]] = {}
    for engine in running.prepared.plan.engines:
        by_role.setdefault(engine.role, []).append(_target(running, engine, front))
    count = math.lcm(*map(len, by_role.values()))
    return [[of_role[at % len(of_role)] for of_role in by_role.values()] for at in range(count)]


def _target(running: RunningStack, engine: EnginePlan, front: LoadTarget) -> LoadTarget:
    service = running.stack.service(engine.name)
    return replace(front, url=service.url, headers=bearer(running.key(service)))


def _seconds(target: LoadTarget, conversation: Conversation) -> float | None:
    (record,) = run_load(target, [conversation], concurrency=1).records
    return None if record.error is not None else record.e2e_s
