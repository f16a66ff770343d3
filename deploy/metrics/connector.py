"""What an engine's connector reports on the engine's metrics page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.metrics.page import MetricsPage

CONNECTOR = "pdkit_connector_info"
FIX = "pdkit_fix_info"
KV = "pdkit_kv_info"
REDIS_FAILED = "pdkit_store_last_failure_timestamp_seconds"
SILENT_WORKERS = "pdkit_silent_workers"


@dataclass(frozen=True)
class ConnectorReport:
    """The report of one engine; empty if the kit's connector does not run in it.

    Attributes:
        lmcache: the version; "" without a report.
        tested: the kit's tests ran the fixes with that version.
        fixes: fix id → its state.
        evidence: fix id → the observation that the state rests on.
        kv: the format of KV in this engine (the connector's `kv_report`).
        redis_failures: kind → the last failure of Redis, in words; the newest kind last.
    """

    lmcache: str = ""
    tested: bool = True
    fixes: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, str] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    redis_failures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, page: MetricsPage) -> ConnectorReport:
        connector = next(_labels_of(page, CONNECTOR), {})
        fixes = {labels["fix"]: labels for labels in _labels_of(page, FIX, "fix", "state")}
        return cls(
            lmcache=connector.get("lmcache", ""),
            tested=connector.get("tested", "yes") == "yes",
            fixes={fix: labels["state"] for fix, labels in fixes.items()},
            evidence={fix: labels.get("evidence", "") for fix, labels in fixes.items()},
            kv=next((_facts(labels["facts"]) for labels in _labels_of(page, KV, "facts")), {}),
            redis_failures=_failures(page),
        )

    def redis_said(self, kinds: Iterable[str]) -> str:
        """Return the last failure of Redis of one of these kinds, in words; "" without any."""
        wanted = set(kinds)
        said = [text for kind, text in self.redis_failures.items() if kind in wanted]
        return said[-1] if said else ""


def _labels_of(page: MetricsPage, name: str, *needed: str) -> Iterator[Mapping[str, str]]:
    """Yield the labels of the samples of a name, the smallest first, that have what is needed."""
    for sample in sorted(page.named(name), key=lambda one: one.value):
        if sample.labels.keys() >= set(needed):
            yield sample.labels


def _facts(text: str) -> Mapping[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _failures(page: MetricsPage) -> dict[str, str]:
    found: dict[str, str] = {}
    for labels in _labels_of(page, REDIS_FAILED, "kind", "way", "said"):
        found.pop(labels["kind"], None)
        found[labels["kind"]] = f"{labels['way']} failed: {labels['said']}"
    return found
