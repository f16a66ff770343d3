"""B15: no record that LMCache logs while it connects to its Redis shows the password."""

from __future__ import annotations

import logging
import os

import lmcache.v1.storage_backend.connector.redis_adapter
import lmcache.v1.storage_backend.remote_backend  # noqa: F401 - their loggers must be there
from lmcache_objects import config, metadata, remote_backend

# Redis takes any password of a user that needs none, so the connection is a real one.
PASSWORD = "s3cret-of-the-trial"


class Kept(logging.Handler):
    """Keep what records say, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def cell() -> None:
    kept = Kept()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "lmcache" and isinstance(logger, logging.Logger):
            logger.addHandler(kept)
    store = f"127.0.0.1:{os.environ['REDIS_PORT']}"
    settings = config(remote_url=f"redis://default:{PASSWORD}@{store}")
    remote_backend(settings, metadata())
    logging.getLogger("lmcache.v1.storage_backend.remote_backend").info("%s", settings)
    told = [line for line in kept.lines if store in line]
    assert told, "LMCache named its store nowhere: the trial saw nothing"
    shown = [line for line in kept.lines if PASSWORD in line]
    assert not shown, f"{len(shown)} of {len(told)} records show the password: {shown[0]}"
