"""An engine's counts of its way to Redis, on the metrics page of vLLM's API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdkit_connector.counters import COUNTERS, HELP, PREFIX, Count, parse
from pdkit_connector.worker_socket import ask_now, workers

QUESTION = "counters"
_LIMIT_S = 0.5


async def answer() -> bytes:
    """Return a worker's answer to QUESTION."""
    return COUNTERS.dump()


class StoreCollector:
    """Collects the counts of an engine's workers, and this process' own, when it is scraped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def describe(self) -> list[Any]:
        """Return nothing: the workers are not there yet when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return the counts as Prometheus' counters, summed over the workers."""
        from prometheus_client.core import CounterMetricFamily

        sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for name, labels, count in [*COUNTERS.all(), *self._of_workers()]:
            of_name = sums.setdefault(name, {})
            key = tuple(sorted(labels.items()))
            of_name[key] = of_name.get(key, 0) + count
        for name in sorted(sums):
            names = sorted({label for key in sums[name] for label, _ in key})
            family = CounterMetricFamily(PREFIX + name, HELP.get(name, ""), labels=names)
            for key, count in sorted(sums[name].items()):
                of_label = dict(key)
                family.add_metric([of_label.get(label, "") for label in names], count)
            yield family

    def _of_workers(self) -> Iterator[Count]:
        for worker in range(workers()):
            if said := ask_now(self._name, worker, QUESTION, _LIMIT_S):
                yield from parse(said)
