"""Wait until started services serve, and tell one that died from one that is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from deploy.errors import StackUnhealthy
from deploy.runtime.launcher import LOG_TAIL, Launcher, Started
from deploy.stack.service import Service

_POLL_S = 0.25
_HEARTBEAT_S = 10.0


def wait_ready(
    started: Mapping[str, tuple[Service, Started]],
    is_ready: Callable[[Service], bool],
    report: Callable[[str], None],
    launcher: Launcher,
    *,
    only: set[str],
) -> dict[str, float]:
    """Wait until the services in `only` are ready; return seconds from each one's start till then.

    All of `started` are watched: a service that became ready and then died is a failure, too.

    Raises:
        StackUnhealthy: one died, or was not ready by its deadline; its last log lines are details.
    """
    took: dict[str, float] = {}
    heartbeat = time.monotonic() + _HEARTBEAT_S
    while True:
        for name, (service, one) in started.items():
            if one.ended is not None:
                raise launcher.died(one)
            if name not in only or name in took:
                continue
            ready = is_ready(service)  # takes a while if the service is slow to answer
            elapsed = time.monotonic() - one.started_monotonic
            if ready:
                took[name] = elapsed
                report(f"{name} is ready after {elapsed:.1f} s")
            elif elapsed > service.ready_s:
                raise _too_slow(service, launcher)
        waiting = sorted(only - took.keys())
        if not waiting:
            return took
        if time.monotonic() > heartbeat:
            heartbeat = time.monotonic() + _HEARTBEAT_S
            report(f"still starting: {', '.join(waiting)}")
        time.sleep(_POLL_S)


def _too_slow(service: Service, launcher: Launcher) -> StackUnhealthy:
    return StackUnhealthy(
        f"{service.name} runs but was not ready within {service.ready_s:g} s; "
        f"log: {launcher.where_log(service.name)}",
        hint="raise timeouts.ready_s in deploy.yaml if it only needs longer",
        details=launcher.log_lines(service.name, LOG_TAIL),
    )
