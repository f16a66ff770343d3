"""How the stack's GPUs were used over all repeats of a run."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.benchmark.results import GpuUse, Repeat


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
