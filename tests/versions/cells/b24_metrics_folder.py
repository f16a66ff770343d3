"""B24: another user made LMCache's folder for metrics; nothing may depend on it."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache.observability import PrometheusLogger
from lmcache_objects import metadata

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def cell() -> None:
    os.environ.pop(VARIABLE, None)
    PrometheusLogger(metadata())
    folder = os.environ[VARIABLE]
    found = Path(folder).stat()
    assert found.st_uid == os.getuid() and not found.st_mode & 0o077, f"{folder} is not private"
