"""What a worker reports: fixes, the format of KV, and the last failures of Redis.

The API server asks for it and shows it on its metrics page. A log cannot carry it: logs are
rotated while the engine serves.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pdkit_connector.redaction import Redactor, known_secrets
from pdkit_connector.registry import FixOutcome
from pdkit_connector.releases import installed_lmcache, is_tested

QUESTION = "report"

CONNECTOR = "pdkit_connector"
FIX = "pdkit_fix"
KV = "pdkit_kv"
REDIS_FAILED = "pdkit_store_last_failure_timestamp_seconds"


class WorkerReport:
    """One worker's report; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fixes: list[dict[str, str]] = []
        self._kv: dict[str, Any] = {}
        self._redis: dict[tuple[str, str], dict[str, Any]] = {}

    def set_fixes(self, outcomes: Iterable[FixOutcome]) -> None:
        """Keep the outcome of each fix."""
        self._fixes = [
            {"fix": one.fix.id, "state": one.state.value, "evidence": one.evidence}
            for one in outcomes
        ]

    def set_kv(self, facts: Mapping[str, Any]) -> None:
        """Keep the format of KV in this engine."""
        self._kv = dict(facts)

    def redis_failed(self, way: str, kind: str, why: str) -> None:
        """Keep the last failure of each kind, without secrets."""
        said = _redactor()(why)
        with self._lock:
            self._redis[way, kind] = {"way": way, "kind": kind, "said": said, "at": time.time()}

    def dump(self) -> bytes:
        """Return the report as JSON, for another process."""
        with self._lock:
            redis = list(self._redis.values())
        report = {"fixes": self._fixes, "kv": self._kv, "redis": redis}
        return json.dumps(report, sort_keys=True, default=str).encode()


@cache
def _redactor() -> Redactor:
    return Redactor(known_secrets())


# What this process reports.
REPORT = WorkerReport()


async def answer() -> bytes:
    """Return a worker's answer to QUESTION."""
    return REPORT.dump()


def families(dumps: Iterable[bytes]) -> Iterator[Any]:
    """Yield the reports of an engine's workers as Prometheus' metrics.

    All workers have the same fixes and KV: the first that has them speaks for all. Under which
    number LMCache's server knows it (`instance`) is each worker's own.
    """
    reports = [json.loads(dump) for dump in dumps]
    fixes = next((report["fixes"] for report in reports if report["fixes"]), None)
    kv = next((report["kv"] for report in reports if report["kv"]), None)
    if fixes:
        release = {"lmcache": installed_lmcache(), "tested": "yes" if is_tested() else "no"}
        yield _info(CONNECTOR, "The connector, and whether its fixes are tested.", [release])
        yield _info(FIX, "A fix of the connector, its state and why.", fixes)
    if kv:
        known = [report["kv"]["instance"] for report in reports if "instance" in report["kv"]]
        kv = {**kv, "instances": known} if known else kv
        facts = {"facts": json.dumps(kv, sort_keys=True)}
        yield _info(KV, "The format of KV in this engine, as JSON.", [facts])
    if failures := [failure for report in reports for failure in report["redis"]]:
        yield _failures(failures)


def _info(name: str, help_text: str, labels: Iterable[Mapping[str, str]]) -> Any:
    from prometheus_client.core import InfoMetricFamily

    family = InfoMetricFamily(name, help_text)
    for one in labels:
        family.add_metric([], dict(one))
    return family


def _failures(failures: Iterable[Mapping[str, Any]]) -> Any:
    """Return the last failure of each kind, by any worker."""
    from prometheus_client.core import GaugeMetricFamily

    labels = ("way", "kind", "said")
    family = GaugeMetricFamily(REDIS_FAILED, "When Redis failed last, by kind.", labels=labels)
    last = {(one["way"], one["kind"]): one for one in sorted(failures, key=lambda one: one["at"])}
    for one in last.values():
        family.add_metric([one[label] for label in labels], one["at"])
    return family
