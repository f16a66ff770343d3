"""Every document that the kit promises: the envelope of each command, and the state file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from deploy.benchmark.compare import Difference
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import Estimate, Ratio
from deploy.benchmark.sweep import Sweep
from deploy.output.contract.check import Check
from deploy.output.contract.made import with_fields_of
from deploy.output.contract.plan import Plan, Rendered
from deploy.output.contract.stack import (
    Drained,
    Examination,
    Exported,
    Logs,
    Patches,
    Restarted,
    Status,
    Swap,
    Up,
    Written,
)
from deploy.output.contract.watch import Frame
from deploy.workflows.catalog_images import ImageRow
from deploy.workflows.down import DownResult
from deploy.workflows.saved_state import HistoryEntry


class Problem(TypedDict):
    """An error.

    Attributes:
        code: a stable word.
        message: what is wrong.
        hint: the next command to type.
        details: more lines, such as the last ones of a log.
    """

    code: str
    message: str
    hint: str
    details: list[str]


class Envelope(TypedDict):
    """What every command prints with `--json`.

    Attributes:
        version: version of pdkit.
        data: the command's result; null after an error that left nothing to show.
    """

    version: str
    command: str
    status: Literal["ok", "error"]
    exit_code: int
    data: Any
    errors: list[Problem]


class Images(TypedDict):
    """The catalogue."""

    images: Sequence[ImageRow]


class Built(TypedDict):
    """Images that were built."""

    built: list[str]


class Pulled(TypedDict):
    """Images that were pulled."""

    pulled: list[str]


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


class ServiceRecord(TypedDict):
    """A started service.

    Attributes:
        pid: 0 for a container.
        start_time: seconds since the boot.
        starts: how often it was started since `up`.
        version: version of pdkit that started it; "" if that was too old to record it.
    """

    name: str
    pid: int
    start_time: float
    log: str
    starts: int
    version: str


class EarlierPlan(TypedDict):
    """A plan that was started before.

    Attributes:
        fingerprint: digest of the stack as it was started.
        spec: the settings.
        machine: what was found when the stack was planned.
        model: what was served.
        generation: what was started, when, and with which outcome.
    """

    fingerprint: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    model: dict[str, Any]
    generation: HistoryEntry


class StateFile(TypedDict):
    """The state file of a stack. Only the same version of pdkit promises to read it.

    Attributes:
        format: format of the file.
        fingerprint: digest of the stack as it was started.
        spec: the settings.
        machine: what was found when the stack was planned.
        boot: id of the boot for which pids and start times are valid; "" for containers.
        generation: what was started, when, and with which outcome.
        history: the plans before this one, the newest first.
        up_extra_s: what the `up` that started all engines took beyond the slowest one's own start;
            null if no `up` did.
    """

    format: int
    name: str
    fingerprint: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    model: dict[str, Any]
    boot: str
    services: dict[str, ServiceRecord]
    generation: HistoryEntry
    history: list[EarlierPlan]
    up_extra_s: float | None


# Command → the type of its `data`.
COMMANDS: dict[str, Any] = {
    "init": Written,
    "up": Up | Plan,
    "plan": Plan,
    "render": Rendered,
    "export kubernetes": Exported,
    "doctor": Examination,
    "check": Check,
    "status": Status | Frame,
    "logs": Logs,
    "down": DownResult,
    "restart": Restarted,
    "drain": Drained,
    "undrain": Drained,
    "swap": Swap,
    "rollback": Swap,
    "patches": Patches,
    "images list": Images,
    "images build": Built,
    "images pull": Pulled,
    "bench": Bench,
    "bench sweep": SweepDone | SweepPlan,
    "bench compare": Comparison | ComparedSweeps,
    "bench report": BenchReport,
}
STATE: Any = StateFile
