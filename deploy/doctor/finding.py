"""Rules, their verdicts, and findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from deploy.doctor.observed import Seen, StepOutcome
from deploy.document import HIDDEN

FindingStatus = Literal["ok", "warn", "fail", "unknown"]
Area = Literal[
    "docker", "gpu", "ports", "memory", "disk", "host", "hub", "engine", "redis", "stack"
]


@dataclass(frozen=True)
class Verdict:
    """A rule's verdict.

    Attributes:
        status: 'unknown' if it could not be checked; the message says why.
        message: what was found, in one line.
        why: the effect on the stack.
        fix: the next command to type, or what to change.
        usage: the spec is wrong, rather than the machine.
    """

    status: FindingStatus
    message: str
    why: str = ""
    fix: str = ""
    usage: Annotated[bool, HIDDEN] = False


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """A finding of `doctor`: the verdict of a rule.

    Attributes:
        id: id of the rule; stable.
        area: what the rule is about.
        status: ok, warn, fail (`up` would fail), or unknown: the message says why.
        message: what was found.
        why: what it leads to; "" if nothing is wrong.
        fix: what to do about it.
    """

    id: str
    area: Area


@dataclass(frozen=True)
class Rule:
    """One check of the doctor.

    Attributes:
        id: '<area>.<thing>', for scripts; never reused for another thing.
        judge: returns None if it does not apply to this stack, or was not examined.
        looks_at, fails, warns, fix: for the reference; "" if it never fails or warns.
    """

    id: str
    judge: Callable[[Seen], Verdict | None]
    looks_at: str
    fails: str = ""
    warns: str = ""
    fix: str = ""

    @property
    def area(self) -> Area:
        """The part of the machine or stack that the rule is about: what its id begins with."""
        return self.id.partition(".")[0]  # type: ignore[return-value]


def ok(message: str) -> Verdict:
    """Return a verdict that all is well; `message` says what was seen."""
    return Verdict("ok", message)


def note(message: str, why: str) -> Verdict:
    """Return a verdict that all is well today; `why` says what will change."""
    return Verdict("ok", message, why)


def warn(message: str, why: str, fix: str) -> Verdict:
    """Return a verdict that does not stop `up`."""
    return Verdict("warn", message, why, fix)


def fail(message: str, why: str, fix: str) -> Verdict:
    """Return a verdict with which `up` cannot succeed."""
    return Verdict("fail", message, why, fix)


def unknown(message: str) -> Verdict:
    """Return a verdict that nothing could be seen; `message` says why."""
    return Verdict("unknown", message)


def tried(step: str, why: str) -> Callable[[Seen], Verdict | None]:
    """Return the judge of a step that `up` also runs; `why` is the effect if it fails."""

    def judge(seen: Seen) -> Verdict | None:
        outcome = seen.outcomes.get(step)
        if outcome is None:
            return None
        return of_outcome(outcome, why)

    return judge


def of_outcome(outcome: StepOutcome, why: str) -> Verdict:
    """Return the verdict on a step, with its own message."""
    if outcome.unknown:
        return unknown(outcome.unknown)
    if not outcome.trouble:
        return ok(outcome.says)
    message = "; ".join((outcome.trouble, *outcome.details))
    return Verdict("fail", message, why, outcome.fix, outcome.usage)
