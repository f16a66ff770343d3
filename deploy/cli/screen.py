"""Text that is refreshed: in place on a terminal, else printed one after the other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from deploy.errors import printable

# The terminal's alternate screen, without a cursor, and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_POLL_S = 0.1

View = Callable[[int | None], str]


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
