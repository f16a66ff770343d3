"""A process that starts a copy of itself again whenever that dies."""

from __future__ import annotations

import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Keeper:
    """The parent of one worker at a time, which ends with it.

    Attributes:
        ended: set in both once they are told to end.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._worker = 0
        for number in _SIGNALS:
            signal.signal(number, self._end)

    def forked(self) -> bool:
        """Start a worker; return True in it, and False in its keeper."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # else a worker might not be told
        self._worker = os.fork()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self._worker == 0

    def death(self) -> int | None:
        """Wait for the worker's end; return its exit code (minus a signal's number).

        None if it has done its work, or was told to end.
        """
        _, status = os.waitpid(self._worker, 0)
        self._worker = 0
        return None if self.ended.is_set() else os.waitstatus_to_exitcode(status) or None

    def _end(self, *_: object) -> None:
        self.ended.set()
        if self._worker:
            os.kill(self._worker, signal.SIGTERM)
