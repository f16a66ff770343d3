"""`deploy drain` and `deploy undrain`: an engine gets no new requests and finishes its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import StackUnhealthy, StateError
from deploy.metrics.router import EngineView
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.drains import drained_by_command, drained_engines, write_drained
from deploy.runtime.events import EventKind, note_event
from deploy.runtime.home import Home
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, metrics_page, require_stack

_POLL_S = 0.1
_PAGE_TIMEOUT_S = 2.0
_NOTICE_S = 10.0  # the router looks ten times a second


@dataclass(frozen=True)
class Drained:
    """`deploy drain` and `undrain`.

    Attributes:
        drained: the engine gets no new requests.
    """

    name: str
    engine: str
    drained: bool


@dataclass(frozen=True)
class DrainOptions:
    """How an engine is taken out of use.

    Attributes:
        wait_s: seconds to wait for its requests to end.
        force: even if no other engine does the same work.
    """

    wait_s: float = 600.0
    force: bool = False


def drain(home: Home, name: str, engine: str, report: Report, options: DrainOptions) -> None:
    """Take an engine out of use until `undrain`, and wait for its requests.

    The caller holds the stack's lock.

    Raises:
        StateError: no such engine, or no other one does the same work.
        StackUnhealthy: it still had requests after the wait; it stays drained.
    """
    running = require_stack(home, name)
    require_engine(running, engine)
    require_others(running, (engine,), options)
    write_drained(_file(home, running), engine, drained=True)
    _note(home, name, engine, "drained", "gets no new requests")
    wait_until_idle(running, engine, report, options.wait_s)


def undrain(home: Home, name: str, engine: str) -> None:
    """Use an engine again. The caller has the lock.

    Raises:
        StateError: no such engine.
        StackUnhealthy: the router goes on leaving it out.
    """
    running = require_stack(home, name)
    require_engine(running, engine)
    before = drained_engines(_file(home, running))
    # Also the line of a restart that was killed, which an older router takes for a drain.
    write_drained(_file(home, running), engine, drained=False)
    if engine in before:
        _note(home, name, engine, "undrained", "gets requests again")
    _await_use(running, engine)


@contextmanager
def drained_for_now(
    home: Home, running: RunningStack, engine: str, report: Report, options: DrainOptions
) -> Iterator[None]:
    """Drain an engine during a with block; one that was drained before stays drained.

    Raises:
        StackUnhealthy: its requests did not end in time, or the router goes on leaving it out.
    """
    with drained_by_command(_file(home, running), (engine,)):
        wait_until_idle(running, engine, report, options.wait_s)
        yield
    if engine not in drained_engines(_file(home, running)):
        _await_use(running, engine)


def require_engine(running: RunningStack, engine: str) -> None:
    """Check that the stack has this engine.

    Raises:
        StateError: naming those that it has.
    """
    if not running.stack.has_front:
        raise running.stack.no_front()
    engines = [one.name for one in running.stack.every if one.role in ENGINE_ROLES]
    if engine not in engines:
        name = running.stack.name
        raise StateError(
            f"the stack '{name}' has no engine '{engine}'; it has: {', '.join(engines)}",
            hint=f"deploy drain {engines[0]} --name {name}",
        )


def require_others(running: RunningStack, engines: Iterable[str], options: DrainOptions) -> None:
    """Check that requests can be served without each of these engines, one at a time.

    Consumers compute the prompts while no producer can, unless the stack is told to refuse that.

    Raises:
        StateError: naming an engine that is needed.
    """
    if options.force or (views := settled_views(running)) is None:
        return
    recompute = running.prepared.spec.router.degrade == "recompute"
    for view in (view for view in views if view.name in set(engines)):
        others = [
            one for one in views
            if one.role == view.role and one.name != view.name and one.healthy and not one.drained
        ]  # fmt: skip
        in_use = view.healthy and not view.drained
        if in_use and not others and not (view.role == "producer" and recompute):
            raise StateError(
                f"{view.name} is the only {view.role} in use, so requests would be refused "
                "without it",
                hint="add --force, or use more engines: deploy up --topology 2p2d",
            )


def wait_until_idle(running: RunningStack, engine: str, report: Report, wait_s: float) -> None:
    """Wait until an engine has no requests, as the router sees it.

    Raises:
        StackUnhealthy: there were requests left.
    """
    began = time.monotonic()
    told = False
    while (view := _view(running, engine)) is not None and not (view.drained and not view.busy):
        passed_s = time.monotonic() - began
        if not view.drained and passed_s > _NOTICE_S:
            raise StackUnhealthy(
                f"the router does not drain {engine}",
                hint=f"deploy restart router --name {running.stack.name}",
            )
        if passed_s > wait_s:
            raise StackUnhealthy(
                f"{engine} still has {view.busy} requests after {wait_s:g} s",
                hint="repeat with a larger --wait",
            )
        if view.drained and not told:
            report(f"{engine} is drained; it has {view.busy} requests left")
            told = True
        time.sleep(_POLL_S)


def engine_views(running: RunningStack) -> tuple[EngineView, ...] | None:
    """Return the engines as the router sees them; None if none answers."""
    if not running.stack.has_front:
        return None
    page = metrics_page(running, running.stack.front, timeout_s=_PAGE_TIMEOUT_S)
    return EngineView.read_all(page) if page is not None else None


def settled_views(running: RunningStack) -> tuple[EngineView, ...] | None:
    """Return the engines as the router sees them; None if no router runs.

    Raises:
        StackUnhealthy: it runs and does not answer.
    """
    until = time.monotonic() + _NOTICE_S
    while (views := engine_views(running)) is None:
        stack = running.stack
        if not stack.has_front or running.service_state(stack.front) != "running":
            return None
        if time.monotonic() > until:
            raise StackUnhealthy(
                f"the router did not answer within {_NOTICE_S:g} s",
                hint=f"deploy logs router --name {running.stack.name}",
            )
        time.sleep(_POLL_S)
    return views


def await_view(
    running: RunningStack,
    engine: str,
    fits: Callable[[EngineView], bool],
    *,
    within_s: float,
    problem: str,
) -> None:
    """Wait until the router sees the engine in this state; return at once if no router runs.

    Raises:
        StackUnhealthy: it does not in time; the message is `problem`.
    """
    until = time.monotonic() + within_s
    while (view := _view(running, engine)) is not None and not fits(view):
        if time.monotonic() > until:
            raise StackUnhealthy(problem, hint=f"deploy restart router --name {running.stack.name}")
        time.sleep(_POLL_S)


def _await_use(running: RunningStack, engine: str) -> None:
    await_view(
        running, engine, lambda view: not view.drained,
        within_s=_NOTICE_S, problem=f"the router still sends no requests to {engine}",
    )  # fmt: skip


def _view(running: RunningStack, engine: str) -> EngineView | None:
    return next((one for one in settled_views(running) or () if one.name == engine), None)


def _file(home: Home, running: RunningStack) -> Path:
    return home.stack(running.stack.name).drain_file


def _note(home: Home, name: str, engine: str, kind: EventKind, text: str) -> None:
    note_event(home.stack(name).events_file, engine, kind, text)
