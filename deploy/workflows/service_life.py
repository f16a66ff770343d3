"""What the supervisor remembers about each service, and how it detects one that hangs.

A service hangs if it served, still runs, and has failed its health checks for long. Or it answers,
but its core, another process, has stopped: requests wait, and nothing is computed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from deploy.metrics.engine import core_counts
from deploy.runtime.launcher import Launcher, Started
from deploy.runtime.state import ServiceRecord
from deploy.stack.service import Service
from deploy.workflows.drain import engine_views
from deploy.workflows.running import RunningStack, metrics_page

LONGEST_PAUSE_S = 60.0
# What the log of a start says that the machine had too little for, at that moment.
_SHORT = re.compile(
    r"MemoryError|Cannot allocate memory|Free memory on device|OutOfMemoryError"
    r"|(?:CUDA|HIP) out of memory|No space left on device|Resource temporarily unavailable"
    r"|killed by signal 9|std::bad_alloc|failed to map segment from shared object"
)
_EVERY_S, _WORK_EVERY_S = 5.0, 30.0
T = TypeVar("T")
Submit = Callable[[Callable[[], T]], Future[T]]


@dataclass(frozen=True)
class RestartPolicy:
    """How often a service that keeps dying is restarted.

    Attributes:
        deaths: give up after this many, none of them after `calm_s` of serving.
        pause_s: before the second start; doubled each time, the first is at once.
    """

    deaths: int = 5
    calm_s: float = 600.0
    pause_s: float = 1.0

    def pause_before(self, start: int) -> float:
        """Return the pause before the first, second, … start."""
        return min(LONGEST_PAUSE_S, self.pause_s * 2 ** (start - 2)) if start > 1 else 0.0


def shortage(launcher: Launcher, started: Started) -> tuple[str, str] | None:
    """Return the resource that a service lacked when it died, and the line of its log.

    Its memory or disk is another's at that moment, so that it was no fault of the service. None if
    it died of something else.
    """
    told = launcher.died(started)
    lines = (started.ended or "", *told.details, told.message)
    found = ((match[0], line.strip()) for line in lines if (match := _SHORT.search(line)))
    return next(found, None)


class Liveness:
    """Asks one engine for its health, without making the caller wait for the answer.

    Silence is counted by questions without an answer, not by the clock: the machine may have slept,
    or the caller may have been held up.
    """

    def __init__(self, submit: Submit[bool]) -> None:
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


class CoreProgress:
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
        """Take what was seen, and look again when it is time; () is unknown."""
        if self._looking is not None and self._looking.done():
            counts, self._looking = self._looking.result(), None
            same = counts and counts == self._last
            self.still_s, self._last = self.still_s + _WORK_EVERY_S if same else 0.0, counts
        if self._looking is None and now_s >= self._due_s:
            self._looking, self._due_s = self._submit(look), now_s + _WORK_EVERY_S


def waited_for(running: RunningStack, service: Service) -> tuple[float, ...]:
    """Return the counts of an engine's core; () if it has no requests or is unknown."""
    views = engine_views(running) or ()
    if not any(view.awaited for view in views if view.name == service.name):
        return ()
    page = metrics_page(running, service)
    return core_counts(page) if page else ()


@dataclass
class Life:
    """The state of one service, as the supervisor sees it.

    Attributes:
        record: of the process that is watched.
        died_at: when it died; None while it serves.
        due: when it will be restarted; None once it was.
        started: the process, if this supervisor started it and so knows its exit code.
        given_up: it died too often.
        tries: to start it, none of them a death: the machine has too little room for it, or the
            model's files are others.
        waits_for: what is in the way of a start, as it was noted; "" if nothing is.
        liveness: tells whether the process `pid` hangs.
        work: tells whether its core does.
    """

    record: ServiceRecord
    liveness: Liveness
    work: CoreProgress
    pid: int = 0
    deaths: int = 0
    serves_since: float = field(default_factory=time.monotonic)
    died_at: float | None = None
    due: float | None = None
    started: Started | None = None
    given_up: bool = False
    tries: int = 0
    waits_for: str = ""
