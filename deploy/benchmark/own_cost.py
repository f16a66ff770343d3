"""What the kit itself costs and how services and GPUs were used, over all repeats of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from deploy.benchmark.results import GpuUse, Percentiles, Repeat, Result, RouterThroughput

_Cost = TypeVar("_Cost", Percentiles, RouterThroughput)


@dataclass(frozen=True)
class OwnCost:
    """The cost of the kit's own parts; None is what the run did not measure.

    Attributes:
        hop_s: what the router adds to a short request.
        throughput: of short requests by the router, and directly.
        barrier_s: how long the store barrier holds an answer back, in the mean of all answers.
        router_cpu_s: CPU time of the router for a request, its health checks meanwhile included.
        store_cpu_s_gb, load_cpu_s_gb: CPU seconds of the engines' threads that move KV to and from
            Redis, for a GB; Redis's own are not among them.
        connector: role → the share of the time of engines' steps that the connector took; the
            median of the repeats.
        up_extra_s: what `deploy up` took beyond its slowest engine's own start.
    """

    hop_s: Percentiles | None
    throughput: RouterThroughput | None
    barrier_s: float | None
    router_cpu_s: float | None
    store_cpu_s_gb: float | None
    load_cpu_s_gb: float | None
    connector: Mapping[str, float]
    up_extra_s: float | None

    @property
    def router_requests_s(self) -> float | None:
        """Requests a second that a router with one core to itself can pass on, or more.

        Health checks cost the same at any rate, so the fewer requests, the more this is too low.
        """
        return 1 / self.router_cpu_s if self.router_cpu_s else None


def own_cost(result: Result) -> OwnCost:
    """Return the kit's own cost in a run."""
    repeats = result.repeats
    answers = sum(one.completed for one in repeats)
    paths = [one.redis_path for one in repeats if one.redis_path]
    waits = [one.barrier_wait_s for one in paths]
    return OwnCost(
        hop_s=result.hop_s,
        throughput=result.router_throughput,
        barrier_s=sum(waits) / answers if waits and answers else None,
        router_cpu_s=_router_cpu_s(repeats),
        store_cpu_s_gb=cpu_s_gb([(one.store_cpu_s, one.stored_bytes) for one in paths]),
        load_cpu_s_gb=cpu_s_gb([(one.load_cpu_s, one.loaded_bytes) for one in paths]),
        connector={
            role: median(one.connector[role] for one in repeats if role in one.connector)
            for role in dict.fromkeys(role for one in repeats for role in one.connector)
        },
        up_extra_s=result.up_extra_s,
    )


def measured_once(runs: Sequence[Result]) -> dict[str, Any]:
    """Return the fields of a result that a run measures once.

    Of costs these are the medians of the runs, of one user's requests the first run's.
    """
    ups = [one.up_extra_s for one in runs if one.up_extra_s is not None]
    return {
        "hop_s": _median([one.hop_s for one in runs if one.hop_s]),
        "router_throughput": _median(
            [one.router_throughput for one in runs if one.router_throughput]
        ),
        "up_extra_s": median(ups) if ups else None,
        "one_user": next((one.one_user for one in runs if one.one_user), None),
    }


def _median(costs: Sequence[_Cost]) -> _Cost | None:
    """Return the medians of all fields."""
    if not costs:
        return None
    kind = type(costs[0])
    return kind(**{name: median(getattr(one, name) for one in costs) for name in kind.model_fields})


def _router_cpu_s(repeats: Sequence[Repeat]) -> float | None:
    measured = [
        (one.usage.cpu_s["router"], one.completed)
        for one in repeats
        if one.usage and "router" in one.usage.cpu_s
    ]
    answers = sum(completed for _, completed in measured)
    return sum(cpu_s for cpu_s, _ in measured) / answers if answers else None


def cpu_s_gb(moved: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the CPU seconds of a GB, from pairs of CPU seconds and bytes."""
    known = [(cpu_s, size) for cpu_s, size in moved if cpu_s is not None]
    total_bytes = sum(size for _, size in known)
    return sum(cpu_s for cpu_s, _ in known) / total_bytes * 1e9 if total_bytes else None


@dataclass(frozen=True)
class ServiceUse:
    """What a service used.

    Attributes:
        cores: CPU time by duration.
        peak_rss_bytes: the most that it held resident; None if that is not known, or for the load
            generator.
    """

    cores: float
    peak_rss_bytes: int | None


def service_use(repeats: Sequence[Repeat]) -> dict[str, ServiceUse]:
    """Return service → what it used over the time of the repeats that measured it."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for repeat in repeats:
        if repeat.usage:
            peaks = repeat.usage.peak_rss_bytes
            for name, cpu_s in repeat.usage.cpu_s.items():
                found.setdefault(name, []).append((repeat.duration_s, cpu_s, peaks.get(name, 0)))
    return {
        name: ServiceUse(
            sum(cpu_s for _, cpu_s, _ in used) / sum(seconds for seconds, _, _ in used),
            max(peak for _, _, peak in used) or None,
        )
        for name, used in found.items()
    }


def gpu_use(repeats: Sequence[Repeat]) -> dict[str, GpuUse]:
    """Return GPU → its mean utilization over the time of the repeats, and its peak memory."""
    found: dict[str, list[tuple[float, GpuUse]]] = {}
    for repeat in repeats:
        for gpu, use in ((repeat.usage and repeat.usage.gpu) or {}).items():
            found.setdefault(gpu, []).append((repeat.duration_s, use))
    return {gpu: _together(found[gpu]) for gpu in sorted(found, key=lambda gpu: (len(gpu), gpu))}


def _together(uses: Sequence[tuple[float, GpuUse]]) -> GpuUse:
    busy = [(s, one.utilization) for s, one in uses if one.utilization is not None]
    peaks = [one.peak_memory_bytes for _, one in uses if one.peak_memory_bytes is not None]
    seconds = sum(s for s, _ in busy)
    return GpuUse(
        utilization=sum(s * share for s, share in busy) / seconds if seconds else None,
        peak_memory_bytes=max(peaks, default=None),
    )
