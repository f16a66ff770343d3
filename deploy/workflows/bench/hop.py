"""What the router adds to a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.benchmark.load import LoadTarget, run_load
from deploy.benchmark.results import Percentiles
from deploy.benchmark.summary import percentiles
from deploy.benchmark.workloads import Conversation, PassSource, TokenRange, WorkloadOptions
from deploy.planning.engines import EnginePlan
from deploy.runtime.engine_api import bearer
from deploy.workflows.running import RunningStack

_SHORT = WorkloadOptions("random", TokenRange(16, 16), TokenRange(1, 1))


def measure_hop(
    running: RunningStack, front: LoadTarget, tokens: Sequence[int], requests: int
) -> Percentiles | None:
    """Return how much longer short requests take by the router than by the engines themselves.

    Each is compared with the same work done directly: by a producer and a consumer, or by one
    aggregated engine. Prompts are too short for a chunk, so that no KV moves. None if a request
    failed, or none is wanted.
    """
    services = [running.stack.service(engine.name) for engine in _route(running)]
    engines = [replace(front, url=one.url, headers=bearer(running.key(one))) for one in services]
    found = []
    for one in PassSource(_SHORT, tokens).one_pass(requests, seed="hop", rate=None):
        through = _seconds(front, one)
        direct = [_seconds(engine, one) for engine in engines]
        if through is None or None in direct:
            return None
        found.append(through - sum(took for took in direct if took is not None))
    return percentiles(found)


def _route(running: RunningStack) -> list[EnginePlan]:
    """Return the engines that serve one request."""
    first = {engine.role: engine for engine in reversed(running.prepared.plan.engines)}
    return list(first.values())


def _seconds(target: LoadTarget, conversation: Conversation) -> float | None:
    (record,) = run_load(target, [conversation], concurrency=1).records
    return None if record.error is not None else record.e2e_s
