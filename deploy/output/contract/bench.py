"""What `deploy bench` and its commands return: runs, sweeps, comparisons and reports."""

from __future__ import annotations

from typing_extensions import TypedDict

from deploy.benchmark.compare import Difference
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import Estimate, Ratio
from deploy.benchmark.sweep import Sweep
from deploy.document import with_fields_of


class Bench(TypedDict):
    """A benchmark run.

    Attributes:
        folder: where its files are.
        report: the page; null if it could not be written.
    """

    folder: str
    report: str | None
    result: Result


class LeftRun(TypedDict):
    """A run that is still to come."""

    round: int
    topology: str


class SweepPlan(TypedDict):
    """`deploy bench sweep --dry-run`.

    Attributes:
        refused: topology → why it cannot be measured here.
        seconds: an estimate.
    """

    runs: list[LeftRun]
    refused: dict[str, str]
    seconds: int


class SweepDone(TypedDict):
    """A finished sweep.

    Attributes:
        best: the file for `deploy up -f`; null if no topology is best.
    """

    folder: str
    report: str | None
    best: str | None
    sweep: Sweep


class MetricRow(TypedDict):
    """One metric at one load.

    Attributes:
        ratio: second / first; null if a value is 0.
    """

    metric: str
    unit: str
    first: Estimate
    second: Estimate
    ratio: Ratio | None
    verdict: str


class ComparedLoad(TypedDict):
    """All metrics at one load."""

    load: str
    metrics: list[MetricRow]


@with_fields_of(Difference)
class UnlikeField(TypedDict):
    """A field in which two runs differ."""


class Comparison(TypedDict):
    """Two results side by side."""

    first: str
    second: str
    points: list[ComparedLoad]
    unlike: list[UnlikeField]
    notes: list[str]


class ComparedTopology(TypedDict):
    """A topology's rate in two sweeps, in requests per second.

    Attributes:
        ratio: second / first.
    """

    topology: str
    first: Estimate
    second: Estimate
    ratio: Ratio
    verdict: str


class ComparedSweeps(TypedDict):
    """Two sweeps side by side.

    Attributes:
        topologies: those that both have a rate of.
    """

    first: str
    second: str
    topologies: list[ComparedTopology]
    unlike: list[UnlikeField]
    notes: list[str]


class BenchReport(TypedDict):
    """A report of results.

    Attributes:
        verdict: its kind.
        ratio: null if nothing was compared.
        files: files that were written, the page first.
    """

    verdict: str
    sentence: str
    note: str
    ratio: Ratio | None
    files: list[str]
