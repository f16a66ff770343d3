"""What the supervisor keeps in mind of each service."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from deploy.runtime.launcher import Started
from deploy.runtime.state import ServiceRecord
from deploy.workflows.liveness import Liveness, Work

LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Patience:
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


@dataclass
class Life:
    """The state of one service, as the supervisor sees it.

    Attributes:
        record: of the process that is watched.
        died_at: when it died; None while it serves.
        due: when it will be restarted; None once it was.
        started: the process, if this supervisor started it and so knows its exit code.
        given_up: it died too often.
        liveness: tells whether the process `pid` hangs.
        work: tells whether its core does.
    """

    record: ServiceRecord
    liveness: Liveness
    work: Work
    pid: int = 0
    deaths: int = 0
    serves_since: float = field(default_factory=time.monotonic)
    died_at: float | None = None
    due: float | None = None
    started: Started | None = None
    given_up: bool = False
