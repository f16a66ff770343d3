"""The data of the commands on a stack: plan, start, look at, change and stop it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from deploy.metrics.store import StoreStats
from deploy.output.contract.check import Check
from deploy.output.contract.kv_server import KvServerUse
from deploy.workflows.history import HistoryEntry
from deploy.workflows.patches import FixRow
from deploy.workflows.status import ServiceStatus


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


class Status(TypedDict):
    """A stack as it is now.

    Attributes:
        up: it was started and not taken down.
        healthy: every service is ready.
        image: of the engines; "" where they are processes.
        url: what clients talk to.
        store: what Redis tells; null where it does not answer.
        user_redis: Redis is the user's own.
        kv_server: what LMCache's server tells; null where there is none, or no answer.
        history: earlier plans, the newest first.
        events: what died, came back, was restarted or drained, the oldest first.
        warnings: what to know before trusting the KV.
        others: other stacks, where this one is not up.
        external_hit_rate: of the engines that answer clients, since they started.
    """

    name: str
    up: bool
    vendor: str
    runtime: str
    image: str
    topology: str
    model: str
    url: str
    services: Sequence[ServiceStatus]
    store: StoreStats | None
    user_redis: bool
    kv_server: KvServerUse | None
    history: Sequence[HistoryEntry]
    events: list[ServiceEvent]
    warnings: list[str]
    others: list[str]
    healthy: bool
    external_hit_rate: float


class Restarted(TypedDict):
    """`deploy restart`.

    Attributes:
        seconds: service → seconds from its stop until it served again.
    """

    name: str
    seconds: dict[str, float]


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


class ServiceEvent(TypedDict):
    """Something that happened to a service.

    Attributes:
        at: when, in UTC.
        kind: a stable word.
    """

    at: str
    service: str
    kind: str
    text: str


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


class Swap(TypedDict):
    """A swap or a rollback.

    Attributes:
        before, after: vendor and image of the engines.
        kept: services that went on running.
        down_s: seconds in which the stack did not serve.
        check: of the new plan; null where nothing had to change.
    """

    name: str
    before: tuple[str, str]
    after: tuple[str, str]
    kept: list[str]
    down_s: float
    seconds: float
    check: Check | None


class Patches(TypedDict):
    """The fixes in one place.

    Attributes:
        where: the stack, image or interpreter.
        lmcache: its version there; "" if unknown.
        proved: the fixes are tested with that version.
        silent: engines that answer and report no fix.
        not_for: why there are none; "" where there are.
        warnings: what to know before trusting the KV.
    """

    where: str
    lmcache: str
    proved: bool
    fixes: Sequence[FixRow]
    silent: list[str]
    not_for: str
    warnings: list[str]
