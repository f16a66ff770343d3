"""`deploy status --watch`: frame after frame, for people or as one JSON object a line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType

from deploy.cli.result import CommandResult
from deploy.cli.shared import unhealthy
from deploy.errors import UsageError, printable
from deploy.metrics.events import Event, remembered
from deploy.metrics.frame import Frame
from deploy.output.envelope import envelope
from deploy.output.watch_view import EVENTS, watch_view
from deploy.workflows.watch import Watch

_LEAST_S, _MOST_S = 0.2, 3600.0
# The terminal's alternate screen, without a cursor, and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_POLL_S = 0.1

View = Callable[[int | None], str]


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


class Screen:
    """Shows views, which are functions of the lines there is room for (None: any number).

    On a terminal the last view stays at the end, below the earlier output.
    """

    def __init__(self) -> None:
        self._live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._view: View | None = None
        self._drawn: os.terminal_size | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._view is not None and not isinstance(error, OSError):
            self._write(f"{_LEAVE}{printable(self._view(None))}\n")

    def show(self, view: View) -> None:
        """Draw a view in place, or print it if stdout is not a terminal."""
        if not self._live:
            self._write(f"{printable(view(None))}\n\n")
            return
        if self._view is None:
            self._write(_ENTER)
        self._view = view
        self._draw()

    def wait(self, seconds: float) -> None:
        """Wait; redraw if the terminal is resized meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
            if self._view is not None and self._size() != self._drawn:
                self._draw()

    def _size(self) -> os.terminal_size:
        # Not shutil.get_terminal_size: the shell's COLUMNS and LINES do not follow a resize.
        return os.get_terminal_size(sys.stdout.fileno())

    def _draw(self) -> None:
        if self._view is None:
            return
        self._drawn = columns, rows = self._size()
        lines = [line[:columns] for line in printable(self._view(rows)).split("\n")[:rows]]
        self._write(_HOME + "\n".join(line + _END_OF_LINE for line in lines) + _BELOW)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
