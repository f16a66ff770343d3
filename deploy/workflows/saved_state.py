"""What is saved of a stack: the plan that it was started by, its services, and its history."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from deploy.config.fields import IN_ENGINES, Connector
from deploy.config.kinds import Kind
from deploy.config.model import Model
from deploy.config.runtimes import RUNTIMES
from deploy.config.shape import ModelShape, OtherLayers
from deploy.config.spec import StackSpec, restored_spec
from deploy.connector.pdkit_connector.identity.model_files import (
    ModelFile,
    files_digest,
    model_files,
)
from deploy.errors import StateError
from deploy.planning.inventory import inventory_from
from deploy.runtime.state import UNFIT, ServiceRecord, StateFile, write_state_file
from deploy.stack.containers import ContainerImages
from deploy.workflows.prepare import Facts, Prepared, engine_image
from deploy.workflows.software import Containers, Programs

PlanOutcome = Literal["good", "unchecked", "failed"]


@dataclass(frozen=True)
class HistoryEntry:
    """One plan that was started.

    Attributes:
        action: what started it: 'up', 'swap' or 'rollback'.
        at: when, in UTC.
        reason: why it failed; "" if it did not.
        connector: how engines shared KV.
    """

    action: str
    at: str
    outcome: PlanOutcome
    vendor: str
    image: str
    topology: str
    reason: str = ""
    connector: Connector = IN_ENGINES

    @property
    def ran_on(self) -> str:
        """The vendor, and the connector where it is not the default."""
        return label(self.vendor, "", self.connector)


def label(vendor: str, image: str, connector: str) -> str:
    """Return in words what engines run on; the default connector is not named."""
    named = "" if connector == IN_ENGINES else connector
    return ", ".join(filter(None, (vendor, image, named)))


@dataclass(frozen=True)
class SavedPlan:
    """A plan that was started, and what it was made from, so that it can be made again.

    Attributes:
        machine: what was found when it was planned.
        model: what `--model` meant then.
        fingerprint: of the stack as it was started.
        generation: what started it, when, and how that went.
    """

    spec: StackSpec
    machine: Facts
    model: Model
    fingerprint: str
    generation: HistoryEntry

    def with_outcome(self, outcome: PlanOutcome, reason: str = "") -> SavedPlan:
        """Return the plan with how it went."""
        return replace(self, generation=replace(self.generation, outcome=outcome, reason=reason))

    def as_dict(self) -> dict[str, Any]:
        """Return it as the state file has it."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "machine": asdict(self.machine),
            "model": asdict(self.model),
            "fingerprint": self.fingerprint,
            "generation": asdict(self.generation),
        }


@dataclass(frozen=True)
class StackState:
    """The state of a stack.

    Attributes:
        plan: the present one.
        boot: the boot id for which pids and start times are valid; "" for containers, which survive
            a reboot.
        history: the plans before this one, the newest first.
        up_extra_s: what the `up` that started all engines took beyond the slowest one's own start,
            its check included; None if no `up` did.
    """

    name: str
    plan: SavedPlan
    boot: str
    services: Mapping[str, ServiceRecord] = field(default_factory=dict)
    history: tuple[SavedPlan, ...] = ()
    up_extra_s: float | None = None

    def with_service(self, record: ServiceRecord) -> StackState:
        """Return the state with this service's record, in place of an older one."""
        return replace(self, services={**self.services, record.name: record})


def write_state(path: Path, state: StackState) -> None:
    """Replace the state file in one step."""
    services = {name: asdict(record) for name, record in state.services.items()}
    write_state_file(path, {
        "name": state.name, **state.plan.as_dict(), "boot": state.boot, "services": services,
        "history": [past.as_dict() for past in state.history], "up_extra_s": state.up_extra_s,
    })  # fmt: skip


def restored_state(file: StateFile) -> StackState:
    """Return the state that a file holds, without earlier plans that do not fit this version.

    Raises:
        UNFIT: another version of the kit wrote it, or it was damaged.
    """
    history = []
    for past in file.values.get("history", ()):
        with suppress(*UNFIT):
            history.append(_restored_plan(past))
    extra_s = file.values.get("up_extra_s")
    return StackState(
        name=file.name,
        plan=_restored_plan(file.values),
        boot=file.boot,
        services=file.services,
        history=tuple(history),
        up_extra_s=None if extra_s is None else float(extra_s),
    )


def _restored_plan(stored: Mapping[str, Any]) -> SavedPlan:
    spec = restored_spec(stored["spec"])
    return SavedPlan(
        spec,
        restored_facts(stored["machine"]),
        restored_model(stored["model"]),
        str(stored["fingerprint"]),
        _restored_entry(stored["generation"]),
    )


def _restored_entry(stored: Mapping[str, Any]) -> HistoryEntry:
    entry = HistoryEntry(**stored)
    if wrong := [name for name, value in asdict(entry).items() if not isinstance(value, str)]:
        raise TypeError(f"generation: {', '.join(wrong)}: not text")
    datetime.fromisoformat(entry.at)
    return entry


def restored_facts(stored: Mapping[str, Any]) -> Facts:
    """Return the facts that `asdict` wrote into a state file.

    Raises:
        KeyError, TypeError, ValueError: another version of the kit wrote them.
    """
    software = stored["software"]
    if stored["runtime"] == "process":
        found: Programs | Containers = Programs(**software)
    else:
        found = Containers(**{**software, "images": ContainerImages(**software["images"])})
    inventory = inventory_from(stored["inventory"])
    vllm, lmcache = stored["versions"]
    if not all(isinstance(one, (str, type(None))) for one in (vllm, lmcache)):
        raise TypeError("machine.versions: not text")
    return Facts(inventory, stored["vendor"], stored["runtime"], found, (vllm, lmcache))


def restored_model(stored: Mapping[str, Any]) -> Model:
    """Return the model that `asdict` wrote into a state file."""
    texts = ("ref", "served_name", "source", "version")
    if wrong := [name for name in texts if not isinstance(stored[name], str)]:
        raise TypeError(f"model: {', '.join(wrong)}: not text")
    shape, kind = stored["shape"], Kind(**stored["kind"])
    files, named = _files(stored.get("files", ())), _files(stored.get("named", ()))
    given = {
        "shape": _shape(shape) if shape else None, "kind": kind, "files": files,
        "named": named,
    }  # fmt: skip
    model = Model(**{**stored, **given})
    if model.source != "folder" or (files and all(isinstance(file[2], str) for file in files)):
        return model
    # An earlier pdkit kept times instead of digests, or nothing. From now on the present content
    # counts. It has another version, so no engine loads what the earlier ones stored.
    present = model_files(Path(model.ref))
    return replace(model, files=present, version=files_digest(present) or model.version)


def _shape(stored: Mapping[str, Any]) -> ModelShape:
    others = tuple(OtherLayers(**one) for one in stored.get("others", ()))
    return ModelShape(**{**stored, "others": others})


def _files(stored: Any) -> tuple[ModelFile, ...]:
    return tuple((str(name), int(size), digest) for name, size, digest in stored)


_KEPT = 20


def new_state(prepared: Prepared, action: str, *, boot: str) -> StackState:
    """Return the state of a stack that is about to be started."""
    return StackState(
        name=prepared.stack.name,
        plan=saved_plan(prepared, action, fingerprint=prepared.stack.fingerprint()),
        boot="" if RUNTIMES[prepared.plan.runtime].survives_reboot else boot,
    )


def saved_plan(prepared: Prepared, action: str, *, fingerprint: str) -> SavedPlan:
    """Return the record of a plan that is about to be started."""
    made = HistoryEntry(
        action=action,
        # Finer than a second, as the history is sorted by it.
        at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        outcome="unchecked",
        vendor=prepared.plan.vendor.name,
        image=engine_image(prepared),
        topology=str(prepared.plan.topology),
        connector=prepared.plan.connector,
    )
    return SavedPlan(prepared.spec, prepared.facts, prepared.model, fingerprint, made)


def following(old: StackState, new: StackState) -> StackState:
    """Return the new state; the old plan becomes the newest entry of its history."""
    return replace(new, history=(old.plan, *old.history)[:_KEPT])


def with_outcome(state: StackState, outcome: PlanOutcome) -> StackState:
    """Return the state with the outcome of the present plan."""
    return replace(state, plan=state.plan.with_outcome(outcome))


def with_failure(old: StackState, tried: StackState, reason: str) -> StackState:
    """Return the old state; the failed attempt becomes the newest entry of its history."""
    failed = tried.plan.with_outcome("failed", reason)
    return replace(old, history=(failed, *old.history)[:_KEPT])


def stack_history(state: StackState) -> list[HistoryEntry]:
    """Return this generation and those before it, the newest first.

    Sorted by time: a failed swap is newer than the generation that serves again.
    """
    entries = [plan.generation for plan in (state.plan, *state.history)]
    return sorted(entries, key=lambda one: one.at, reverse=True)


def last_good(state: StackState) -> SavedPlan:
    """Return the last good plan before this one.

    Raises:
        StateError: there is none.
    """
    for past in state.history:
        if past.generation.outcome == "good" and past.fingerprint != state.plan.fingerprint:
            return past
    raise StateError(
        f"the stack '{state.name}' has no earlier plan that passed its check",
        hint=f"deploy status --name {state.name}, which shows its history",
    )
