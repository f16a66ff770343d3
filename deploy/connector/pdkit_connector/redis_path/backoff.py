"""Whether to ask Redis now: after a failure there is a short pause."""

from __future__ import annotations

import threading
import time

from pdkit_connector.engine_report import REPORT
from pdkit_connector.log import get_logger

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_TELL_AGAIN_S = 60.0


class Backoff:
    """One way of using Redis (say, storing), which pauses after each failure, longer each time.

    A pause lasts at most a second, so that a server that comes back is used again at once.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0
        self._told_at: dict[str, float] = {}
        self._told = False

    def pausing(self) -> bool:
        """Tell whether there is a pause now."""
        return time.monotonic() < self._until

    def failed(self, kind: str, why: str) -> None:
        """Begin a pause; log why, at most once a minute for each kind."""
        now = time.monotonic()
        REPORT.redis_failed(self._what, kind, why)
        with self._lock:
            if now >= self._until:  # work that fails during a pause began before it
                self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
                self._until = now + self._pause_s
            tell = now - self._told_at.get(kind, -_TELL_AGAIN_S) >= _TELL_AGAIN_S
            if tell:
                self._told_at[kind] = now
                self._told = True
        if tell:
            get_logger().warning("pdkit-connector WARNING Redis: %s failed: %s", self._what, why)

    def worked(self) -> None:
        """Forget the failure; log that it is over, if it was logged."""
        if not self._pause_s:
            return
        with self._lock:
            self._pause_s = self._until = 0.0
            told, self._told = self._told, False
        if told:
            get_logger().info("pdkit-connector Redis: %s works again", self._what)
