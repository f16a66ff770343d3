"""B10: what asynchronous loading reads from Redis equals what a plain load reads.

CacheGen needs a GPU, so the serializer here is one of LMCache's interface that inverts bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import torch
from lmcache.v1.storage_backend.naive_serde.serde import Deserializer, Serializer
from lmcache_objects import chunk, config, key, metadata, remote_backend
from pdkit_connector.setting import Setting

BITES = Setting(
    engine=True,
    extra_config={
        "lmcache.remote_serde": "cachegen",
        "lmcache.enable_async_loading": True,
        "lmcache.use_layerwise": False,
    },
)


def inverted(memory_obj: Any) -> Any:
    bits = memory_obj.tensor.view(torch.int16)
    bits.bitwise_not_()
    return memory_obj


class Invert(Serializer):
    def serialize(self, memory_obj: Any) -> Any:
        return inverted(memory_obj)


class Revert(Deserializer):
    def deserialize(self, memory_obj: Any) -> Any:
        return inverted(memory_obj)


def cell() -> None:
    backend = remote_backend(config(), metadata())
    backend.serializer, backend.deserializer = Invert(), Revert()
    whole, stored = key(secrets.randbits(60)), chunk(backend, fill=3)
    expected = stored.tensor.clone()
    backend.submit_put_task(whole, stored).result(timeout=60)
    assert torch.equal(backend.get_blocking(whole).tensor, expected), "the plain load is off"
    reading = backend.batched_get_non_blocking("lookup", [whole])
    (found,) = asyncio.run_coroutine_threadsafe(reading, backend.loop).result(timeout=60)
    assert torch.equal(found.tensor, expected), "loaded as stored, not deserialized"
