"""A clock that stands still while the machine keeps this process from running.

Limits are proved by the time that a call takes. On a busy machine each wait ends late, by no fault
of the call: a thread that does nothing but short waits measures how late, and that is not counted.
"""

from __future__ import annotations

import threading
import time

_WAIT_S = 0.005
# What a wait is late by on an idle machine counts.
_ALWAYS_LATE_S = 0.001


class _FairClock:
    def __init__(self) -> None:
        self._lost_s = 0.0
        self._due = time.monotonic()
        self._started = threading.Event()

    def now(self) -> float:
        if not self._started.is_set():
            threading.Thread(target=self._measure, daemon=True).start()
            self._started.wait()
        at, lost_s, due = time.monotonic(), self._lost_s, self._due
        # A wait that should have ended is late already.
        return at - lost_s - max(0.0, at - due)

    def _measure(self) -> None:
        while True:
            self._due = time.monotonic() + _WAIT_S + _ALWAYS_LATE_S
            self._started.set()
            time.sleep(_WAIT_S)
            self._lost_s += max(0.0, time.monotonic() - self._due)


now = _FairClock().now
