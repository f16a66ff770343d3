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
        # What was lost so far, and when the wait under way is due: both of one moment.
        self._measured = (0.0, time.monotonic())
        self._start = threading.Lock()
        self._started = threading.Event()

    def now(self) -> float:
        with self._start:
            if not self._started.is_set():
                threading.Thread(target=self._measure, daemon=True).start()
                self._started.wait()
        measured = None
        while measured is not self._measured:
            measured = self._measured
            at = time.monotonic()
        lost_s, due = measured
        # A wait that should have ended is late already.
        return at - lost_s - max(0.0, at - due)

    def _measure(self) -> None:
        lost_s, at = 0.0, time.monotonic()
        while True:
            due = at + _WAIT_S + _ALWAYS_LATE_S
            self._measured = (lost_s, due)
            self._started.set()
            time.sleep(_WAIT_S)
            at = time.monotonic()
            lost_s += max(0.0, at - due)


now = _FairClock().now
