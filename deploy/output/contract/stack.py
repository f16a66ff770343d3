"""The data of the commands on a stack: plan, start, look at, change and stop it."""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from deploy.output.contract.check import Check
from deploy.workflows import patches as found
from deploy.workflows.restart import RestartResult
from deploy.workflows.status import StackStatus
from deploy.workflows.swap import SwapResult


def _document(name: str, made: type, **more: Any) -> Any:
    """Return a document with the fields of a dataclass, and those that are added or differ."""
    whole: Any = TypedDict(name, {**get_type_hints(made), **more})  # type: ignore[misc]
    whole.__doc__ = made.__doc__
    return whole


class Exported(TypedDict):
    """A folder for another place than this machine.

    Attributes:
        pods: vendor → workload → number of pods.
        images: that nodes must be able to pull.
        notes: what was assumed.
        then: the commands to type next.
    """

    namespace: str
    files: list[str]
    pods: dict[str, dict[str, int]]
    images: list[str]
    notes: list[str]
    then: list[str]


class Up(TypedDict):
    """A start.

    Attributes:
        url: what clients talk to.
        started: service → seconds until it was ready; empty where all ran already.
        slowest_engine_s: seconds of the slowest engine's start.
        check: null with `--no-check`.
        warnings: what does not watch the stack though it should, and why.
    """

    name: str
    url: str
    model: str
    started: dict[str, float]
    slowest_engine_s: float
    ready_s: float
    total_s: float
    check: Check | None
    warnings: list[str]


class Drained(TypedDict):
    """`deploy drain` and `undrain`.

    Attributes:
        drained: the engine gets no new requests.
    """

    name: str
    engine: str
    drained: bool


class Written(TypedDict):
    """`deploy init`.

    Attributes:
        file: that was written.
        settings: that it sets.
        found: what this machine has, in words.
        cached_models: models of Hugging Face that are here.
    """

    file: str
    settings: dict[str, Any]
    found: str
    cached_models: list[str]


class LogLine(TypedDict):
    """One line of a log."""

    service: str
    line: str


class Logs(TypedDict):
    """The last lines of logs.

    Attributes:
        files: service → the file, or the command that shows it.
    """

    files: dict[str, str]
    lines: list[LogLine]


class DoctorFinding(TypedDict):
    """A finding of `doctor`.

    Attributes:
        id: of the rule; stable.
        status: ok, warn, fail or unknown.
        fix: what to do about it.
    """

    id: str
    area: str
    status: str
    message: str
    why: str
    fix: str


class Examination(TypedDict):
    """What `doctor` found.

    Attributes:
        topology: "" where no plan fits this machine.
    """

    name: str
    vendor: str
    runtime: str
    topology: str
    findings: list[DoctorFinding]


Status = _document(
    "Status",
    StackStatus,
    healthy=Annotated[bool, Field(description="every service is ready.")],
    external_hit_rate=Annotated[
        float, Field(description="of the engines that answer clients, since they started.")
    ],
)
Restarted = _document("Restarted", RestartResult)
Swap = _document("Swap", SwapResult, check=Check | None)
Patches = _document(
    "Patches",
    found.Patches,
    warnings=Annotated[list[str], Field(description="what to know before trusting the KV.")],
)
