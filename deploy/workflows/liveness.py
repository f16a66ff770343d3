"""Tells an engine that hangs: it served, still runs, and has not answered for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

_EVERY_S = 5.0


class Liveness:
    """Asks one engine for its health, without making the caller wait for the answer.

    Silence is counted by questions without an answer, not by the clock: the machine may have slept,
    or whoever asks may have been held up.
    """

    def __init__(self, submit: Callable[[Callable[[], bool]], Future[bool]]) -> None:
        """`submit` has a question asked by another thread."""
        self.silent_s = 0.0
        self._submit = submit
        self._asking: Future[bool] | None = None
        self._answered = False
        self._due_s = 0.0

    def probe(self, ask: Callable[[], bool], now_s: float, has_loaded: Callable[[], bool]) -> None:
        """Take the last answer, and ask again when it is time.

        An engine that never answered is loading its model, unless it `has_loaded` for certain.
        """
        if self._asking is not None and self._asking.done():
            answered, self._asking = self._asking.result(), None
            if answered:
                self._answered, self.silent_s = True, 0.0
            elif self._answered or has_loaded():
                self.silent_s += _EVERY_S
        if self._asking is None and now_s >= self._due_s:
            self._asking, self._due_s = self._submit(ask), now_s + _EVERY_S
