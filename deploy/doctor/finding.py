"""What a rule says, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deploy.doctor.seen import Outcome, Seen

Status = Literal["ok", "warn", "fail", "unknown"]
Area = Literal[
    "docker", "gpu", "ports", "memory", "disk", "host", "hub", "engine", "redis", "stack"
]


@dataclass(frozen=True)
class Verdict:
    """What a rule says of what was seen.

    Attributes:
        status: 'unknown' where it could not be looked at; the message says why.
        message: what was seen, in one line.
        why: what it does to the stack.
        fix: the next command to type, or what to change.
        usage: the spec is wrong, rather than the machine.
    """

    status: Status
    message: str
    why: str = ""
    fix: str = ""
    usage: bool = False


@dataclass(frozen=True)
class Finding:
    """A verdict and the rule it is of."""

    id: str
    area: Area
    status: Status
    message: str
    why: str = ""
    fix: str = ""
    usage: bool = False

    def as_dict(self) -> dict[str, str]:
        """Return what scripts read."""
        return {
            "id": self.id,
            "area": self.area,
            "status": self.status,
            "message": self.message,
            "why": self.why,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Rule:
    """One thing that is looked at.

    Attributes:
        id: '<area>.<thing>', for scripts; never reused for another thing.
        judge: None where it does not concern this stack, or nobody looked.
        looks_at, fails, warns, fix: for the reference; "" where it never does.
    """

    id: str
    judge: Callable[[Seen], Verdict | None]
    looks_at: str
    fails: str = ""
    warns: str = ""
    fix: str = ""

    @property
    def area(self) -> Area:
        return self.id.partition(".")[0]  # type: ignore[return-value]


def ok(message: str) -> Verdict:
    return Verdict("ok", message)


def unknown(message: str) -> Verdict:
    return Verdict("unknown", message)


def tried(step: str, why: str) -> Callable[[Seen], Verdict | None]:
    """Return the judge of a step that `up` takes too, by the same code; `why` where it fails."""

    def judge(seen: Seen) -> Verdict | None:
        outcome = seen.outcomes.get(step)
        if outcome is None:
            return None
        return of_outcome(outcome, why)

    return judge


def of_outcome(outcome: Outcome, why: str) -> Verdict:
    """Return the verdict on a step: its own words, whether it went well or not."""
    if outcome.unknown:
        return unknown(outcome.unknown)
    if not outcome.trouble:
        return Verdict("ok", outcome.says)
    message = "; ".join((outcome.trouble, *outcome.details))
    return Verdict("fail", message, why, outcome.fix, outcome.usage)


def found_by(rules: Sequence[Rule], seen: Seen) -> list[Finding]:
    """Return what the rules find, in their order."""
    findings = []
    for rule in rules:
        verdict = rule.judge(seen)
        if verdict is not None:
            findings.append(Finding(rule.id, rule.area, **vars(verdict)))
    return findings
