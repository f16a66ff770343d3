"""One trial: a fault at a random moment under load, and its effect on requests and stack."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.faults.clients import REFUSED, Clients
from bench.faults.faults import Fault
from bench.faults.history import BAD, OUTCOMES, Asked, History, verdict
from deploy.workflows.running import RunningStack

_POLL_S = 0.1

Find = Callable[[], RunningStack]


@dataclass(frozen=True)
class Load:
    """What clients ask.

    Attributes:
        answers: to each prompt, by its number.
        before_s, after_s: how long they ask before the fault, and after the stack is whole again.
        late_s: an answer that takes longer is late.
        back_s: how long the stack may take to be whole again.
    """

    prompts: Sequence[str]
    answers: Mapping[int, str]
    clients: int
    tokens: int
    before_s: tuple[float, float] = (1.0, 4.0)
    after_s: float = 2.5
    late_s: float = 60.0
    back_s: float = 300.0


def trial(find: Find, fault: Fault, load: Load, seed: int, file: Path | None) -> dict[str, Any]:
    """Do a fault once; return a row of the results.

    Args:
        find: returns the stack as its state file has it now.
        file: for one line a request.
    """
    before = find()
    history = History(file)
    choice = random.Random(seed)  # noqa: S311 - the same moment each time
    url, model = before.stack.front.url, before.prepared.plan.model.served_name
    with Clients(
        url, model, load.prompts, history, count=load.clients, tokens=load.tokens, seed=seed
    ):
        time.sleep(choice.uniform(*load.before_s))
        began = time.monotonic()
        fault.happen()
        passed = time.monotonic()
        _await_whole(find, before, fault, load.back_s)
        whole_s = time.monotonic() - passed
        time.sleep(load.after_s)
    old = {name: one.pid for name, one in before.state.services.items()}
    now = find().state.services  # a swap may have added one, or taken one away
    restarted = [name for name, one in now.items() if old.get(name) != one.pid]
    judged = _judged(history, fault, load, began, passed)
    return {
        "fault": fault.name, "seed": seed, **judged, "lasted s": round(passed - began, 1),
        "whole after s": round(whole_s, 1), "started again": restarted,
    }  # fmt: skip


def _judged(
    history: History, fault: Fault, load: Load, began: float, passed: float
) -> dict[str, Any]:
    """Count requests by their outcome; those with a bad one are named."""

    def meanwhile(one: Asked) -> bool:
        return one.ended_s >= began and one.sent_s <= passed

    def outcome(one: Asked) -> str:
        told = verdict(one, load.answers, load.late_s)
        if told != "lost":
            return told
        if one.status == REFUSED:
            return "refused"
        return "cut" if fault.breaks_off and meanwhile(one) else "lost"

    judged = [(outcome(one), one) for one in history.requests]
    counted = Counter(name for name, _ in judged)
    longest = max((one.ended_s - one.sent_s for one in history.requests), default=0.0)
    return {
        "requests": len(judged),
        "meanwhile": sum(map(meanwhile, history.requests)),
        **{name: counted[name] for name in OUTCOMES},
        "longest s": round(longest, 1),
        "bad": [repr(one) for name, one in judged if name in BAD],
    }


def _await_whole(find: Find, before: RunningStack, fault: Fault, limit_s: float) -> None:
    """Wait until what was killed is another process, and everything serves."""
    until = time.monotonic() + limit_s
    while True:
        now = find()
        anew = (
            now.state.services[name].pid != before.state.services[name].pid for name in fault.kills
        )
        if all(anew) and is_whole(now):
            return
        if time.monotonic() > until:
            raise SystemExit(f"{fault.name}: the stack is not whole again after {limit_s:g} s")
        time.sleep(_POLL_S)


def is_whole(running: RunningStack) -> bool:
    """Tell whether every service serves, and the router sees every engine."""
    return all(running.is_ready(service) for service in running.stack.services) and (
        _serving(running) == len(running.prepared.plan.engines)
    )


def _serving(running: RunningStack) -> int:
    try:
        said = httpx.get(f"{running.stack.front.url}/readiness", trust_env=False, timeout=5).json()
    except httpx.HTTPError:
        return 0
    return int(said["prefill"]["healthy"] + said["decode"]["healthy"])
