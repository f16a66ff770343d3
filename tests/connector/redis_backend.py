"""The Redis path's plug-in, made by LMCache's own hands, and chunks to store and load with it."""

from __future__ import annotations

import sys
from pathlib import Path

from pdkit_connector import store_barrier
from redis_servers import eventually

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    chunk,
    key,
    metadata,
    running_loop,
)

PAYLOAD = 2 * LAYERS * CHUNK * HEADS * HEAD_SIZE * 2


def made(settings, **facts):
    """Return the plug-in, made by LMCache's own hands, or None if LMCache gave up on it."""
    from lmcache.v1.storage_backend import CreateStorageBackends

    backends = CreateStorageBackends(settings, metadata(**facts), running_loop(), "cpu")
    return backends.get("pdkit")


def stored(backend, *numbers: int) -> None:
    keys = [key(number) for number in numbers]
    objs = [chunk(backend, number) for number in numbers]
    backend.batched_submit_put_task(keys, objs)
    for obj in objs:
        obj.ref_count_down()
    eventually(lambda: not store_barrier.under_way(), 30)


def loaded(objs) -> list[float | None]:
    values = [None if obj is None else float(obj.tensor.float().mean()) for obj in objs]
    for obj in objs:
        if obj is not None:
            assert obj.get_ref_count() == 1, "the caller's, and nobody else's"
            obj.ref_count_down()
    return values
