"""Tells an engine that hangs: it served, still runs, and has not answered for long.

Or it answers, but its core, another process, has stopped: requests wait, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from deploy.metrics.engine import core_counts
from deploy.stack.service import Service
from deploy.workflows.drain import engine_views
from deploy.workflows.running import RunningStack, metrics_page

_EVERY_S, _WORK_EVERY_S = 5.0, 30.0
T = TypeVar("T")
Submit = Callable[[Callable[[], T]], Future[T]]


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


class Work:
    """Compares what an engine's core has counted while requests wait for it.

    One step is the least that moves a count, which is why the limit must be longer than any step. A
    core that hangs without requests is seen with the first one.
    """

    def __init__(self, submit: Submit[tuple[float, ...]]) -> None:
        self.still_s = 0.0
        self._submit = submit
        self._looking: Future[tuple[float, ...]] | None = None
        self._last: tuple[float, ...] = ()
        self._due_s = 0.0

    def probe(self, look: Callable[[], tuple[float, ...]], now_s: float) -> None:
        """Take what was seen, and look again when it is time; () tells nothing."""
        if self._looking is not None and self._looking.done():
            counts, self._looking = self._looking.result(), None
            same = counts and counts == self._last
            self.still_s, self._last = self.still_s + _WORK_EVERY_S if same else 0.0, counts
        if self._looking is None and now_s >= self._due_s:
            self._looking, self._due_s = self._submit(look), now_s + _WORK_EVERY_S


def waited_for(running: RunningStack, service: Service) -> tuple[float, ...]:
    """Return what an engine's core has counted, () where it owes no answer or does not tell."""
    views = engine_views(running) or ()
    if not any(view.awaited for view in views if view.name == service.name):
        return ()
    page = metrics_page(running, service)
    return core_counts(page) if page else ()
