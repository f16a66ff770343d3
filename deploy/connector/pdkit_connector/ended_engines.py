"""LMCache's server releases memory and lookups of engines and requests that have ended.

LMCache 0.5.6 never frees two things: the memory of every CPU engine that it has known, which is
all of an engine's KV space at each of its restarts, and lookups whose engine did not ask for the
result. `python -m bench.kv_server_kills` counts what is left.
"""

from __future__ import annotations

import threading
from typing import Any


def release_ended() -> None:
    """Have the server of this process do so, before it starts.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    from lmcache.v1.multiprocess.modules.lookup import LookupModule
    from lmcache.v1.platform.devices.cpu import shm

    shm._CPU_SHM_KEEP_ALIVE = Forgetful()
    made = LookupModule.__init__

    def make(self: Any, ctx: Any) -> None:
        made(self, ctx)
        ctx.session_manager.destroy_listeners.append(EndedLookups(self))

    LookupModule.__init__ = make


class Forgetful(dict[int, Any]):
    """Takes everything and keeps nothing.

    A mapping is released when the last tensor that uses it is gone. LMCache keeps one of them here
    until then, which is never. The tensors themselves keep the buffer that they were made of.
    """

    def __setitem__(self, key: int, value: Any) -> None:
        """Keep nothing."""


class EndedLookups:
    """Drops the lookups of requests that have ended, with their results."""

    def __init__(self, lookups: Any) -> None:
        self._lookups = lookups
        self._running: list[Any] = []
        self._lock = threading.Lock()

    def __call__(self, session: Any) -> None:
        """Clean up after an ended session; those before it may still have had to wait."""
        lookups = self._lookups
        with lookups._prefetch_job_lock:
            job = lookups._prefetch_jobs.pop(session.request_id, None)
        storage = lookups.context.storage_manager
        with self._lock:
            ended = self._running if job is None else [*self._running, job]
            # A result is handed out once, and then forgotten.
            self._running = [
                one for one in ended if storage.query_prefetch_status(one.handle) is None
            ]
