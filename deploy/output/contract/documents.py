"""Every document that the kit promises: the envelope of each command, and the state file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from deploy.benchmark.compare import Comparison
from deploy.benchmark.compare_sweeps import ComparedSweeps
from deploy.benchmark.report.files import BenchReport
from deploy.output.bench_view import Bench, SweepDone, SweepPlan
from deploy.output.contract.watch import Frame
from deploy.output.plan_document import Plan, Rendered
from deploy.verify.report import CheckReport
from deploy.workflows.catalog_images import ImageRow
from deploy.workflows.doctor import Examination
from deploy.workflows.down import DownResult
from deploy.workflows.drain import Drained
from deploy.workflows.export_folder import Exported
from deploy.workflows.fix_states import Fixes
from deploy.workflows.init import Written
from deploy.workflows.logs import Logs
from deploy.workflows.restart import RestartResult
from deploy.workflows.saved_state import HistoryEntry
from deploy.workflows.status import StackStatus
from deploy.workflows.swap import SwapResult
from deploy.workflows.up import Up


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


class ServiceRecord(TypedDict):
    """A started service.

    Attributes:
        pid: 0 for a container.
        start_time: seconds since the boot.
        starts: how often it was started since `up`.
        version: version of pdkit that started it.
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
    "check": CheckReport,
    "status": StackStatus | Frame,
    "logs": Logs,
    "down": DownResult,
    "restart": RestartResult,
    "drain": Drained,
    "undrain": Drained,
    "swap": SwapResult,
    "rollback": SwapResult,
    "fixes": Fixes,
    "images list": Images,
    "images build": Built,
    "images pull": Pulled,
    "bench": Bench,
    "bench sweep": SweepDone | SweepPlan,
    "bench compare": Comparison | ComparedSweeps,
    "bench report": BenchReport,
}
STATE: Any = StateFile
