"""`deploy status --watch`: frame after frame, for people or as one JSON object a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count

from deploy.cli.result import CommandResult
from deploy.cli.screen import Screen
from deploy.cli.shared import unhealthy
from deploy.errors import UsageError
from deploy.metrics.events import Event, remembered
from deploy.metrics.frame import Frame
from deploy.output.envelope import envelope
from deploy.output.watch_view import EVENTS, watch_view
from deploy.workflows.watch import Watch

_LEAST_S, _MOST_S = 0.2, 3600.0


def watch_stack(
    watch: Watch, *, interval_s: float, frames: int | None, json: bool, hint: str = ""
) -> CommandResult:
    """Show frames until Ctrl-C, or until `frames` were shown.

    Args:
        hint: what to type where a service is not ready; by default, what starts it here.

    Raises:
        UsageError: the interval is out of range.
        PdkitError: the first look at the stack fails.
    """
    if not _LEAST_S <= interval_s <= _MOST_S:
        raise UsageError(
            f"--interval {interval_s:g}: expected seconds from {_LEAST_S} to {_MOST_S:g}",
            hint="deploy status --watch --interval 2",
        )
    frame = None
    with suppress(KeyboardInterrupt):  # the normal way to end it
        with Screen() as screen:
            wait = time.sleep if json else screen.wait
            recent: tuple[Event, ...] = ()
            for frame in _frames(watch, interval_s, frames, wait):
                recent = remembered(recent, frame.events, EVENTS)
                if json:
                    print(_line(frame, hint), flush=True)
                else:
                    screen.show(partial(watch_view, frame, recent))
        errors = unhealthy(frame.sick, frame.name, hint=hint) if frame else ()
        return CommandResult("status", None, "", errors)
    return CommandResult("status", None, "")


def _frames(
    watch: Watch, interval_s: float, most: int | None, wait: Callable[[float], None]
) -> Iterator[Frame]:
    """Yield a frame each interval, or at once if the last one took longer than that."""
    for number in count(1):
        due = time.monotonic() + interval_s
        yield watch.frame()
        if number == most:
            return
        wait(max(0.0, due - time.monotonic()))


def _line(frame: Frame, hint: str) -> str:
    errors = unhealthy(frame.sick, frame.name, hint=hint)
    code = errors[0].exit_code if errors else 0
    return envelope("status", exit_code=code, data=frame.as_dict(), errors=errors, indent=None)
