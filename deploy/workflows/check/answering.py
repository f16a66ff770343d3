"""Whether all that serve requests answer, before a check asks them anything."""

from __future__ import annotations

import time

from deploy.errors import StackUnhealthy
from deploy.stack.service import Service
from deploy.workflows.running import RunningStack, store_of

_DEADLINE_S, _POLL_S = 10.0, 0.1


def require_answers(running: RunningStack) -> None:
    """Check that all that serve requests answer; the router may need time to notice a return.

    Raises:
        StackUnhealthy: naming those that do not.
    """
    deadline = time.monotonic() + _DEADLINE_S
    watching = running.stack.monitoring
    silent = [service for service in running.stack.every if service not in watching]
    while silent := [service for service in silent if not _answers(running, service)]:
        if time.monotonic() > deadline:
            names = [service.name for service in silent]
            raise StackUnhealthy(
                f"not answering: {', '.join(names)}", hint=running.hint_on(silent[0])
            )
        time.sleep(_POLL_S)


def _answers(running: RunningStack, service: Service) -> bool:
    """Tell whether a service answers; an error of Redis is an answer, which the check reports."""
    if running.is_ready(service):
        return True
    if service.role != "redis":
        return False
    with store_of(running) as store:
        return store.refusal() is not None
