"""The history of a stack: each plan started under its name, and its outcome."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from deploy.config.runtimes import RUNTIMES
from deploy.errors import StateError
from deploy.workflows.prepare import Prepared, engine_image
from deploy.workflows.saved_state import HistoryEntry, PlanOutcome, SavedPlan, StackState

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
