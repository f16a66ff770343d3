"""Compares two sweeps topology by topology, and refuses to compare unlike ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import computed_field

from deploy.benchmark.compare import (
    NOT_INTERLEAVED,
    UnlikeField,
    require_alike,
    unlike_conditions,
)
from deploy.benchmark.slo import parse_slo
from deploy.benchmark.statistics import Estimate, Ratio, median_of, separate_ratio
from deploy.benchmark.sweep import Sweep, TopologyRow, rows
from deploy.benchmark.verdict import shown
from deploy.errors import UsageError

_MEASURED = ("model", "workload", "machine", "versions")
_ASKED = ("slo_share", "concurrency", "seed")


@dataclass(frozen=True)
class ComparedTopology:
    """A topology's rate in two sweeps, in requests per second.

    Attributes:
        first: rate in A.
        second: rate in B.
        ratio: second / first.
    """

    topology: str
    first: Estimate
    second: Estimate
    ratio: Ratio

    @computed_field
    @property
    def verdict(self) -> str:
        """Better, worse, or why neither is known."""
        if self.ratio.low is None:
            return self.ratio.difference
        return {1: "better", -1: "worse"}.get(shown(self.ratio), "no significant difference")


@dataclass(frozen=True)
class ComparedSweeps:
    """Two sweeps side by side.

    Attributes:
        first: folder of the first sweep (A).
        second: folder of the second sweep (B).
        topologies: those that both have a rate of.
        unlike: settings in which the sweeps differ.
        notes: what limits the comparison, a sentence each.
    """

    first: str
    second: str
    topologies: Sequence[ComparedTopology]
    unlike: Sequence[UnlikeField]
    notes: Sequence[str]


def compare_sweeps(first: Sweep, second: Sweep, *, anyway: bool = False) -> ComparedSweeps:
    """Return two sweeps side by side, by the topologies that both have a rate of.

    The caller knows their folders.

    Raises:
        UsageError: the sweeps are unlike and `anyway` is not set, or have no topology in common.
    """
    unlike = sweep_differences(first, second)
    if not anyway:
        require_alike(unlike)
    ours, theirs = ({row.topology: row for row in rows(one)} for one in (first, second))
    compared = [
        _compared(name, first, second)
        for name, row in ours.items()
        if row.rate and name in theirs and theirs[name].rate
    ]
    if not compared:
        each = "; and ".join(_measured(one) for one in (ours, theirs))
        raise UsageError(
            f"the sweeps have no topology in common that has a rate: {each}",
            hint="run deploy bench sweep with the same --topologies for both",
        )
    return ComparedSweeps("", "", compared, unlike, [*_notes(first, second, ours, theirs)])


def sweep_differences(first: Sweep, second: Sweep) -> list[UnlikeField]:
    """Return the fields that must be alike and are not, or that a sweep does not say."""
    unknown = [
        UnlikeField(
            name, *("known" if getattr(one, name) else "unknown" for one in (first, second))
        )
        for name in _MEASURED
        if not (getattr(first, name) and getattr(second, name))
    ]
    known = [name for name in _MEASURED if name not in {one.field for one in unknown}]
    conditions = (
        {"slo": parse_slo(one.slo) if one.slo else None}
        | {name: getattr(one, name) for name in (*known, *_ASKED)}
        for one in (first, second)
    )
    redis = all(one.versions and one.versions.lmcache for one in (first, second))
    return unknown + unlike_conditions(*conditions, both_redis=redis)


def _known(value: object) -> str:
    return "known" if value else "unknown"


def _compared(name: str, first: Sweep, second: Sweep) -> ComparedTopology:
    ours, theirs = ([run.rate for run in one.of(name) if run.rate] for one in (first, second))
    return ComparedTopology(name, median_of(ours), median_of(theirs), separate_ratio(theirs, ours))


def _measured(found: Mapping[str, TopologyRow]) -> str:
    return ", ".join(name for name, row in found.items() if row.rate) or "none"


def _notes(
    first: Sweep,
    second: Sweep,
    ours: Mapping[str, TopologyRow],
    theirs: Mapping[str, TopologyRow],
) -> Iterator[str]:
    for side, sweep in (("A", first), ("B", second)):
        if sweep.verdict is None:
            yield f"{side} is not finished: only its finished runs are compared"
    for name in dict.fromkeys((*ours, *theirs)):
        for side, found in (("A", ours), ("B", theirs)):
            if name not in found:
                yield f"{name}: not in {side}"
            elif found[name].why_not:
                yield f"{name} in {side}: {found[name].why_not}"
    yield NOT_INTERLEAVED
