"""B1: compressed bytes, and single layers of a model with two layer groups, come back from Redis.

The compressed object is LMCache's own BytesBufferMemoryObj, which is what CacheGenSerializer
returns; the encoder itself needs a GPU.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch
from lmcache.v1 import protocol
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, config, key, metadata, remote_backend
from trial import NotHere


def cell() -> None:
    if not hasattr(protocol, "init_remote_metadata_info"):
        raise NotHere("metadata of one record whatever the object")
    layers_stored = layer_survives(groups=1)
    for groups in (1, 2):
        compressed_survives(groups=groups)
    # Where a layer cannot be stored in one group either, that is B5.
    assert layer_survives(groups=2) or not layers_stored, "a layer in two groups is lost"


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


def layer_survives(*, groups: int) -> bool:
    backend = store(groups, use_layerwise=True)
    shape = torch.Size((CHUNK, 2, HEADS * HEAD_SIZE))
    layer = backend.local_cpu_backend.allocate(shape, torch.bfloat16, fmt=MemoryFormat.KV_T2D)
    layer.tensor.copy_(torch.randn(shape))
    expected = layer.tensor.clone()
    layer_key = key(secrets.randbits(60)).split_layers(2)[1]
    put(backend, layer_key, layer)
    found = backend.get_blocking(layer_key)
    return found is not None and torch.equal(found.tensor, expected)


def store(groups: int, **settings: Any) -> Any:
    """Return a remote backend of an engine whose KV layers form `groups` groups."""
    facts = metadata()
    facts.get_num_groups = lambda: groups
    return remote_backend(config(**settings), facts)


def put(backend: Any, of: Any, memory_obj: Any) -> None:
    """Store an object and wait for it; an error is left to LMCache, which only logs it."""
    backend.submit_put_task(of, memory_obj).exception(timeout=60)
