"""B5: single layers go to Redis and come back the same, by every way LMCache reads them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, config, key, metadata, remote_backend

SHAPES = {
    MemoryFormat.KV_T2D: (CHUNK, 2, HEADS * HEAD_SIZE),
    MemoryFormat.KV_2TD: (2, CHUNK, HEADS * HEAD_SIZE),
}


def cell() -> None:
    backend = remote_backend(config(use_layerwise=True), metadata())
    for fmt, shape in SHAPES.items():
        keys = key(secrets.randbits(60)).split_layers(LAYERS)
        layers = [filled(backend, torch.Size(shape), fmt) for _ in keys]
        expected = [layer.tensor.clone() for layer in layers]
        for layer_key, layer in zip(keys, layers, strict=True):
            backend.submit_put_task(layer_key, layer).result(timeout=60)
        check(keys, [backend.get_blocking(k) for k in keys], expected, fmt)
        reading = backend.batched_get_non_blocking("lookup", keys)
        found = asyncio.run_coroutine_threadsafe(reading, backend.loop).result(timeout=60)
        check(keys, found, expected, fmt)


def filled(backend: Any, shape: torch.Size, fmt: MemoryFormat) -> Any:
    layer = backend.local_cpu_backend.allocate(shape, torch.bfloat16, fmt=fmt)
    layer.tensor.copy_(torch.randn(shape))
    return layer


def check(keys: Any, found: Any, expected: list[torch.Tensor], fmt: MemoryFormat) -> None:
    assert len(found) == len(keys)
    for layer, tensor in zip(found, expected, strict=True):
        assert layer is not None, "a stored layer is not there"
        assert layer.get_memory_format() is fmt
        assert (layer.get_shape(), layer.get_dtype()) == (tensor.shape, tensor.dtype)
        assert torch.equal(layer.tensor, tensor)
