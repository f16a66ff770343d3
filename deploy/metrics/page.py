"""A metrics page: what a service counted by now, or between two readings."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deploy.verify.store_path import Sample

# Ends of the names of counters, which only grow until their service restarts.
_COUNTER_ENDS = ("_total", "_count", "_sum", "_bucket")

# An engine's longest line has a few KiB. The parser takes time in the square of a line's length.
_LONGEST_LINE = 1 << 16
# How a line begins and ends, about which the parser is laxer than Prometheus.
_NAME = re.compile(r"[a-zA-Z_:][\w:]*", re.ASCII)
_VALUE = re.compile(r"\s*\S+(\s+-?\d+)?", re.ASCII)

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

    A counter that is infinite or no number is left out.

    Raises:
        ValueError: it has another format.
    """
    lines = (line.strip() for line in text.split("\n"))
    # Without the comments, by which the parser renames counters.
    samples = (_sample(line) for line in lines if line and line[0] != "#")
    return MetricsPage(tuple(filter(_counts, samples)))


def _counts(sample: Sample) -> bool:
    return math.isfinite(sample.value) or not sample.name.endswith(_COUNTER_ENDS)


def _sample(line: str) -> Sample:
    name = _NAME.match(line)
    value = _VALUE.fullmatch(line, line.rfind("}") + 1 or (name.end() if name else 0))
    try:
        if not name or not value or len(line) > _LONGEST_LINE:
            raise ValueError
        ((found,),) = (family.samples for family in text_string_to_metric_families(line))
        if (found.name, found.timestamp is None) != (name[0], value[1] is None):
            raise ValueError  # two lines in one: the parser passes over what is between
        return Sample(found.name, found.labels, float(found.value))
    except (ValueError, LookupError, OverflowError) as exc:
        raise ValueError(f"not a sample: {line[:100]!r}") from exc


def _page(counters: Iterable[tuple[_Key, float]]) -> MetricsPage:
    return MetricsPage(
        tuple(Sample(name, dict(labels), value) for (name, labels), value in counters)
    )
