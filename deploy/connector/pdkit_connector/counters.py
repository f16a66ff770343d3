"""What the store's path counts, for Prometheus and for people."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping

PREFIX = "pdkit_store_"

HELP: Mapping[str, str] = {
    "bytes": "Payload bytes, by operation (load, store).",
    "seconds": "Seconds of work, by operation (load, store, lookup); stores run side by side.",
    "cpu_seconds": "CPU seconds of the threads that move values, by operation (load, store).",
    "calls": "Prompts, by operation (load, lookup).",
    "chunks": "Chunks, by operation and result.",
    "replaced": "Chunks that were replaced while they were loaded, and loaded again.",
    "failures": "Failures of Redis, by kind.",
    "connects": "Connections made to Redis.",
    "step_seconds": "Seconds of the workers' steps, by part (connector, rest).",
    "barrier_waits": "Answers that waited for their stores, by result (stored, late, absent).",
    "barrier_seconds": "Seconds that answers waited for their stores.",
}

LabelledCount = tuple[str, Mapping[str, str], float]
Key = tuple[str, tuple[tuple[str, str], ...]]


def key_of(name: str, /, **labels: str) -> Key:
    """Return the key of a count, for `add_all`."""
    return name, tuple(sorted(labels.items()))


class Counters:
    """Counts that only grow, by name and labels; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Key, float] = {}

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a count; its name is one of HELP."""
        self.add_all(((key_of(name, **labels), amount),))

    def add_all(self, amounts: Iterable[tuple[Key, float]]) -> None:
        """Add to several counts at once."""
        with self._lock:
            for counted, amount in amounts:
                self._counts[counted] = self._counts.get(counted, 0) + amount

    def value(self, name: str, /, **labels: str) -> float:
        """Return the sum of the counts of a name that have these labels."""
        wanted = labels.items()
        return sum(n for of, having, n in self.all() if of == name and wanted <= having.items())

    def all(self) -> list[LabelledCount]:
        """Return every count as (name, labels, value)."""
        with self._lock:
            return [(name, dict(labels), n) for (name, labels), n in self._counts.items()]

    def dump(self) -> bytes:
        """Return every count as JSON, for another process."""
        return json.dumps(self.all()).encode()


def parse(dumped: bytes) -> list[LabelledCount]:
    """Return the counts of a dump."""
    return [(name, labels, float(n)) for name, labels, n in json.loads(dumped)]


# What this process counts; an engine's worker has one way to Redis.
COUNTERS = Counters()
