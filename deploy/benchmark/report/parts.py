"""Into which parts a request's time and the prompts' tokens divide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from deploy.benchmark.break_even import prefill_s
from deploy.benchmark.report.points import Point

# The stages as a request passes them, with the colour's order in the chart.
_STAGES = {
    ("producer", "queue"): "queue before prefill",
    ("aggregated", "queue"): "queue before prefill",
    ("producer", "lookup"): "lookup",
    ("aggregated", "lookup"): "lookup",
    ("producer", "prefill"): "prefill",
    ("aggregated", "prefill"): "prefill",
    ("producer", "store"): "KV store",
    ("consumer", "queue"): "queue before decode",
    ("consumer", "lookup"): "lookup",
    ("consumer", "load"): "KV load",
    ("producer", "load"): "KV load",
    ("aggregated", "load"): "KV load",
    ("consumer", "load and prefill"): "KV load and first token",
    ("consumer", "prefill"): "first token after load",
    ("consumer", "decode"): "decode",
    ("aggregated", "decode"): "decode",
}
STAGE_ORDER = tuple(dict.fromkeys(_STAGES.values()))
SOURCES = {"external": "loaded from Redis", "local": "engine's cache", "computed": "computed"}


def stages(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the mean ms of a request in each stage, none of them within another."""
    for point in found:
        ms: dict[str, float] = {}
        for (role, stage), name in _STAGES.items():
            found_s = (_own_s(role, one.stages.get(role, {})) for one in point.repeats)
            known = [own[stage] for own in found_s if stage in own]
            if known:
                ms[name] = ms.get(name, 0.0) + 1e3 * median(known)
        for name in sorted(ms, key=STAGE_ORDER.index):
            yield {
                "stack": point.run.name,
                "stage": name,
                "order": STAGE_ORDER.index(name),
                "ms": ms[name],
            }


def _own_s(role: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage; of prefill, without those of the stages within it."""
    own = dict(seconds)
    if "prefill" in own:
        own["prefill"] = prefill_s(seconds)
    if role == "consumer" and "load" not in own and "prefill" in own:
        own["load and prefill"] = own.pop("prefill")  # LMCache's server loads, and does not tell
    return own


def sources(found: Iterable[Point]) -> Iterator[dict[str, Any]]:
    """Yield the share of prompt tokens by where their KV came from."""
    for point in found:
        hits = [one.hits for one in point.repeats if one.hits]
        totals = {name: sum(getattr(one, name) for one in hits) for name in SOURCES}
        every = sum(totals.values())
        for at, (name, tokens) in enumerate(totals.items()):
            if every:
                yield {
                    "stack": point.run.name,
                    "source": SOURCES[name],
                    "order": at,
                    "share": tokens / every,
                }
