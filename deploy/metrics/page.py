"""A metrics page: what a service counted by now, or between two readings."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from deploy.verify.store_path import Sample

# Ends of the names of counters, which only grow until their service restarts.
_COUNTER_ENDS = ("_total", "_count", "_sum", "_bucket")

# A sample of Prometheus' text format: name, labels, value; a time stamp may follow. Parts next
# to each other share no character, so that time is in proportion to any line's length.
_QUOTED = r'[^"\\]*(?:\\.[^"\\]*)*'
_LABELS = rf'[^"}}]*(?:"{_QUOTED}"[^"}}]*)*'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][\w:]*)(?:\s*\{{({_LABELS})\}}\s*|\s+)(\S+)(?:\s+-?\d+)?", re.ASCII
)
_LABEL = re.compile(rf'\s*(\w+)\s*=\s*"({_QUOTED})"\s*(?:,|$)', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class MetricsPage:
    """The samples of one page, gauges among them; of a difference or a sum: the counters only."""

    samples: tuple[Sample, ...] = ()

    def named(self, name: str) -> list[Sample]:
        """Return the samples of a name, with any labels."""
        return [sample for sample in self.samples if sample.name == name]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of a name that have these labels; None without any."""
        found = [s.value for s in self.named(name) if labels.items() <= s.labels.items()]
        return sum(found) if found else None

    def count(self, name: str, **labels: str) -> int:
        """Return such a sum as a whole number; 0 if it is infinite."""
        total = self.total(name, **labels) or 0
        return int(total) if math.isfinite(total) else 0

    def since(self, earlier: MetricsPage) -> MetricsPage:
        """Return the difference from an earlier reading.

        A counter that shrank was reset in between, so that it counts from its start.
        """
        before = earlier.counters()
        return _page(
            (key, value - before.get(key, 0.0) if value >= before.get(key, 0.0) else value)
            for key, value in self.counters().items()
        )

    def __add__(self, other: MetricsPage) -> MetricsPage:
        sums = defaultdict(float, self.counters())
        for key, value in other.counters().items():
            sums[key] += value
        return _page(sums.items())

    def counters(self) -> dict[_Key, float]:
        """Return name and labels → value of all that only grows."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for sample in self.samples
            if sample.name.endswith(_COUNTER_ENDS)
        }


def parsed_page(text: str) -> MetricsPage:
    """Parse a page in Prometheus' text format.

    Not by prometheus_client, whose import alone takes a tenth of the CPU of `deploy status`.
    A counter that is infinite or no number is left out.

    Raises:
        ValueError: it has another format.
    """
    lines = (line.strip() for line in text.split("\n"))
    samples = (_sample(line) for line in lines if line and line[0] != "#")
    return MetricsPage(tuple(filter(_counts, samples)))


def _counts(sample: Sample) -> bool:
    return math.isfinite(sample.value) or not sample.name.endswith(_COUNTER_ENDS)


def _sample(line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ValueError(f"not a sample: {line[:100]!r}")
    name, labels, value = found.groups()
    return Sample(name, _labels(labels or ""), float(value))


def _labels(text: str) -> dict[str, str]:
    labels, at, end = {}, 0, len(text.rstrip())
    while at < end:
        found = _LABEL.match(text, at)
        if found is None:
            raise ValueError(f"not a label: {text[at : at + 100]!r}")
        labels[found[1]] = _ESCAPED.sub(_unescaped, found[2]) if "\\" in found[2] else found[2]
        at = found.end()
    return labels


def _unescaped(escaped: re.Match[str]) -> str:
    return {"n": "\n", '"': '"', "\\": "\\"}.get(escaped[1], escaped[0])


def _page(counters: Iterable[tuple[_Key, float]]) -> MetricsPage:
    return MetricsPage(
        tuple(Sample(name, dict(labels), value) for (name, labels), value in counters)
    )
