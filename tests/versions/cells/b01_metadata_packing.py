"""B1: compressed bytes come back from Redis.

The compressed object is LMCache's own BytesBufferMemoryObj, which is what CacheGenSerializer
returns; the encoder itself needs a GPU.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache_objects import config, key, metadata, remote_backend


def cell() -> None:
    for groups in (1, 2):
        compressed_survives(groups=groups)


def compressed_survives(*, groups: int) -> None:
    payload = os.urandom(1234)
    backend, whole = store(groups), key(secrets.randbits(60))
    put(backend, whole, BytesBufferMemoryObj(payload))
    found = backend.get_blocking(whole)
    assert found is not None, f"compressed bytes in {groups} groups are lost"
    assert bytes(found.byte_array) == payload
    assert found.get_memory_format() is MemoryFormat.BINARY_BUFFER
    assert found.get_shape() == torch.Size((len(payload), 0, 0, 0))
    assert found.get_dtype() is None


def store(groups: int) -> Any:
    """Return a remote backend of an engine whose KV layers form `groups` groups."""
    facts = metadata()
    facts.get_num_groups = lambda: groups
    return remote_backend(config(), facts)


def put(backend: Any, of: Any, memory_obj: Any) -> None:
    """Store an object and wait for it; an error is left to LMCache, which only logs it."""
    backend.submit_put_task(of, memory_obj).exception(timeout=60)
