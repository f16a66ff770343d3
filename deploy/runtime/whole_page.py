"""An engine's metrics page with the counts of all its workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from deploy.metrics.connector import SILENT_WORKERS
from deploy.metrics.page import MetricsPage

_WAIT_S = 5.0
_PAUSE_S = 0.1
_READS = 10  # which takes a second where a worker is absent, not late


def whole_page(read: Callable[[], MetricsPage]) -> MetricsPage:
    """Read an engine's page, again while one of its workers does not report, for some 5 s.

    An engine waits half a second for each worker, and shows what it last reported. Had it never
    been asked before, all that it ever counted would seem to be new on the next page.
    """
    deadline = time.monotonic() + _WAIT_S
    for _ in range(_READS):
        page = read()
        if not page.total(SILENT_WORKERS) or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)
    return page
