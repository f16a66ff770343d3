"""The history of a stack: each plan started under its name, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from deploy.config.choices import IN_ENGINES
from deploy.config.spec import StackSpec
from deploy.errors import StateError
from deploy.runtime.state import StackState
from deploy.workflows.prepare import Prepared, engine_image

PlanOutcome = Literal["good", "unchecked", "failed"]
_KEPT = 20
# Fields that make up a generation; the rest of a state file describes the present moment.
_FIELDS = ("spec", "machine", "model", "fingerprint", "generation")


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
    connector: str = IN_ENGINES

    @property
    def ran_on(self) -> str:
        """The vendor, and the connector where it is not the default."""
        return label(self.vendor, "", self.connector)


def label(vendor: str, image: str, connector: str) -> str:
    """Return in words what engines run on; the default connector is not named."""
    named = "" if connector == IN_ENGINES else connector
    return ", ".join(filter(None, (vendor, image, named)))


def new_state(prepared: Prepared, action: str, *, boot: str) -> StackState:
    """Return the state of a stack that is about to be started."""
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
    return StackState(
        name=prepared.stack.name,
        fingerprint=prepared.stack.fingerprint(),
        spec=prepared.spec.model_dump(mode="json"),
        machine=asdict(prepared.facts),
        model=asdict(prepared.model),
        boot="" if prepared.facts.software.survive_reboot else boot,
        generation=asdict(made),
    )


def following(old: StackState, new: StackState) -> StackState:
    """Return the new state; the old one becomes the newest entry of its history."""
    return replace(new, history=(_past(old), *old.history)[:_KEPT])


def with_outcome(state: StackState, outcome: PlanOutcome) -> StackState:
    """Return the state with the outcome of the present plan."""
    return replace(state, generation={**state.generation, "outcome": outcome})


def with_failure(old: StackState, tried: StackState, reason: str) -> StackState:
    """Return the old state; the failed attempt becomes the newest entry of its history."""
    failed = {**_past(tried), "generation": {**tried.generation, "outcome": "failed",
              "reason": reason}}  # fmt: skip
    return replace(old, history=(failed, *old.history)[:_KEPT])


def stack_history(state: StackState) -> list[HistoryEntry]:
    """Return this generation and those before it, the newest first.

    Sorted by time: a failed swap is newer than the generation that serves again.
    """
    kept = [(state.spec, state.generation)]
    kept += [(past["spec"], past["generation"]) for past in state.history]
    # Earlier versions did not write the connector there.
    entries = (
        HistoryEntry(**{"connector": spec.get("connector") or IN_ENGINES, **one})
        for spec, one in kept
    )
    return sorted(entries, key=lambda one: one.at, reverse=True)


def last_good(state: StackState) -> tuple[StackSpec, Mapping[str, Any], Mapping[str, Any]]:
    """Return spec, facts and model, as stored, of the last good generation before this one.

    Raises:
        StateError: there is none.
    """
    for past in state.history:
        if past["generation"]["outcome"] == "good" and past["fingerprint"] != state.fingerprint:
            return StackSpec.model_validate(past["spec"]), past["machine"], past["model"]
    raise StateError(
        f"the stack '{state.name}' has no earlier plan that passed its check",
        hint=f"deploy status --name {state.name}, which shows its history",
    )


def _past(state: StackState) -> dict[str, Any]:
    kept = asdict(state)
    return {field: kept[field] for field in _FIELDS}
