"""The results of a pass, by the generator's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deploy.benchmark.load import Load
from deploy.benchmark.results import Percentiles, Repeat, Slo
from deploy.benchmark.slo import percentile, share_within


def said(repeat: Repeat) -> str:
    """Return a repeat in a line."""
    parts = [f"{repeat.completed} of {repeat.sent} answered in {repeat.duration_s:.1f} s"]
    if repeat.ttft_s:
        parts.append(f"TTFT p50 {1e3 * repeat.ttft_s.p50:.0f} ms")
    if repeat.itl_s:
        parts.append(f"ITL p50 {1e3 * repeat.itl_s.p50:.1f} ms")
    if repeat.within_slo is not None:
        parts.append(f"{100 * repeat.within_slo:.0f} % within the SLO")
    return ", ".join(parts)


def summary(load: Load, slo: Slo | None, *, index: int = 0) -> Repeat:
    """Return the results of a pass, by the client's clock."""
    records, duration_s = load.records, load.duration_s
    good = [one for one in records if one.error is None]
    share = share_within(records, slo) if slo else None
    return Repeat(
        index=index,
        rate=None,
        concurrency=None,
        duration_s=round(duration_s, 4),
        warmup_s=0.0,
        sent=len(records),
        completed=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(one.error for one in records if one.error is not None)),
        ttft_s=percentiles([one.ttft_s for one in good if one.ttft_s is not None]),
        itl_s=percentiles([gap for one in good for gap in one.itl_s]),
        e2e_s=percentiles([one.e2e_s for one in good]),
        requests_per_s=round(len(good) / duration_s, 4),
        input_tokens_per_s=round(sum(one.input_tokens for one in good) / duration_s, 2),
        output_tokens_per_s=round(sum(one.output_tokens for one in good) / duration_s, 2),
        within_slo=share,
        goodput_per_s=None if share is None else round(share * len(records) / duration_s, 4),
        hits=None,
        redis_path=None,
        usage=None,
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the distribution of values in seconds; None without any."""
    if not values:
        return None
    p50, p90, p99 = (round(percentile(values, at), 6) for at in (50, 90, 99))
    return Percentiles(p50=p50, p90=p90, p99=p99, mean=round(sum(values) / len(values), 6))
