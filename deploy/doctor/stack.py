"""Rules on what earlier runs of a stack left behind."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, fail, of_outcome, ok, warn
from deploy.doctor.observed import Seen, StackSeen


def _up(seen: Seen) -> Verdict | None:
    stack, name = seen.stack, seen.spec.name
    outcome = seen.outcomes.get("state")
    if outcome is not None and outcome.trouble:
        return of_outcome(outcome, "`up` cannot tell which of its services run")
    if stack is None:
        return None
    if stack.left and not stack.running:
        return warn(
            f"{stack.left} processes or containers of a stack '{name}' run without a state file",
            "they use memory and ports until `up` stops them",
            f"deploy down --name {name}",
        )
    return ok(_standing(stack, name))


def _standing(stack: StackSeen, name: str) -> str:
    if stack.running and stack.missing:
        return f"'{name}' is partly up; `up` starts {', '.join(stack.missing)}"
    if stack.running:
        return f"'{name}' is up already; `up` checks it again"
    if stack.state:
        return f"'{name}' was started before but does not run; `up` cleans up what is left"
    return f"no stack '{name}' yet"


def _lock(seen: Seen) -> Verdict | None:
    if seen.stack is None:
        return None
    if seen.stack.locked:
        return fail(
            f"another deploy command works on the stack '{seen.spec.name}'",
            "two commands at once would undo each other",
            "wait for it, or stop it with Ctrl-C",
        )
    return ok("no other command works on it")


def _alike(seen: Seen) -> Verdict | None:
    stack, name = seen.stack, seen.spec.name
    if stack is None or not stack.reports:
        return None
    anew = f"deploy down --name {name}, then deploy up --name {name}"
    if stack.apart:
        return warn(
            f"the engines differ: {'; '.join(stack.apart)}",
            "each finds no KV of the others, and computes those prompts itself",
            anew,
        )
    if stack.unplanned:
        return warn(
            f"the engines do not run what was planned: {'; '.join(stack.unplanned)}",
            "they find no KV that was stored as planned, such as before an upgrade",
            anew,
        )
    return ok("all engines run what was planned")


RULES = (
    Rule(
        "stack.up", _up,
        looks_at="what an earlier run of this name left: running services, state, orphans",
        fails="its state cannot be read (exit code 2)",
        warns="processes or containers run without a state file", fix="`deploy down`",
    ),
    Rule(
        "stack.lock", _lock,
        looks_at="whether another command works on the stack; a lock left by a dead command is "
        "ignored",
        fails="another command works on it", fix="wait for it",
    ),
    Rule(
        "stack.engines", _alike,
        looks_at="what running engines report, such as versions, data types and the "
        "model: [identity of KV](kv-identity.md)",
        warns="an engine runs something else than the others, or all run something else than "
        "planned",
        fix="`deploy down`, then `deploy up`",
    ),
)  # fmt: skip
