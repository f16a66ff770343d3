"""How services and GPUs were used over all repeats of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.benchmark.results import GpuUse, Repeat


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
