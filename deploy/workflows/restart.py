"""`deploy restart`: start services again, one after the other, without a lost request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from deploy.errors import StateError
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.events import note_event
from deploy.runtime.home import Home
from deploy.stack.service import STORE_ROLES, Service
from deploy.workflows.check import renew_store_connections
from deploy.workflows.drain import DrainOptions, await_view, drained_for_now, require_others
from deploy.workflows.model_files import require_same_model
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, require_stack
from deploy.workflows.start import StackStart

_NOTICE_S = 60.0


@dataclass(frozen=True)
class RestartResult:
    """What was restarted.

    Attributes:
        seconds: service → seconds from its stop until it served again.
    """

    name: str
    seconds: dict[str, float]


def restart_services(
    home: Home, name: str, service: str | None, report: Report, options: DrainOptions
) -> RestartResult:
    """Restart one service, or all engines one after the other. The caller holds the lock.

    Each engine is drained first. It gets requests again when it serves, and when the router has
    sent it one of its own.

    Raises:
        StateError: no such service here, or no other engine serves what one of them serves.
        ModelChanged: an engine would get other weights than those that the stack serves.
        StackUnhealthy: an engine's requests did not end, or a service did not come back.
    """
    running = require_stack(home, name)
    chosen = _chosen(running, service)
    require_others(running, [one.name for one in chosen if one.role in ENGINE_ROLES], options)
    result = RestartResult(name, {})
    for one in chosen:
        running = require_stack(home, name)
        if one.role in ENGINE_ROLES:
            require_same_model(running.prepared)  # while it still serves
        drains = one.role in ENGINE_ROLES and running.service_state(one) == "running"
        with (
            drained_for_now(home, running, one.name, report, options)
            if drains
            else nullcontext()
        ):  # fmt: skip
            result.seconds[one.name] = round(_restart(home, running, one, report), 2)
        text = f"restarted by command, serves again after {result.seconds[one.name]:.1f} s"
        note_event(home.stack(name).events_file, one.name, "restarted", text)
    return result


def _chosen(running: RunningStack, service: str | None) -> Sequence[Service]:
    if service is None:
        return [one for one in running.stack.services if one.role in ENGINE_ROLES]
    try:
        chosen = running.stack.service(service)
    except KeyError:
        name, names = running.stack.name, [one.name for one in running.stack.services]
        raise StateError(
            f"the stack '{name}' has no service '{service}'; it has: {', '.join(names)}",
            hint=f"deploy restart {names[0]} --name {name}",
        ) from None
    if chosen in running.stack.remote:
        raise StateError(
            f"{service} runs on another host ({chosen.url})",
            hint=f"deploy drain {service} --name {running.stack.name} here first, then "
            "deploy restart on that host",
        )
    return [chosen]


def _restart(home: Home, running: RunningStack, service: Service, report: Report) -> float:
    began = time.monotonic()
    start = StackStart(running.prepared, running.state, home, report)
    if record := running.state.services.get(service.name):
        grace_s = running.prepared.spec.timeouts.stop_s
        start.launcher.stop({service.name: record}, grace_s=grace_s)
    start.require_room([service])
    start.run([service])
    if failure := start.not_watching.get(service.name):
        raise failure
    again = require_stack(home, running.stack.name)
    if service.role in ENGINE_ROLES:
        await_view(
            again, service.name, lambda view: view.healthy, within_s=_NOTICE_S,
            problem=f"{service.name} serves, but the router does not see it after {_NOTICE_S:g} s",
        )  # fmt: skip
    if service.role in STORE_ROLES and not again.stopped():
        renew_store_connections(home, again)
    return time.monotonic() - began
