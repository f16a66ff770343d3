"""The clock of the other tests: it sees a call that takes too long, and not a busy machine."""

from __future__ import annotations

import ctypes
import time

from tests.connector import fair_clock


def test_waiting_counts_as_time():
    def lost_s() -> float:
        began, really = fair_clock.now(), time.monotonic()
        time.sleep(0.02)
        return time.monotonic() - really - (fair_clock.now() - began)

    # A busy machine takes a part of most of them.
    assert min(lost_s() for _ in range(50)) < 0.005


def test_time_in_which_this_process_cannot_run_does_not_count():
    fair_clock.now()
    libc = ctypes.PyDLL(None)  # which keeps all threads from running
    began = fair_clock.now()
    libc.usleep(500_000)
    assert fair_clock.now() - began < 0.1
