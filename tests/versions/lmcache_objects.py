"""Real LMCache objects, made the same way on every release."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from typing import Any

import torch

LAYERS, CHUNK, HEADS, HEAD_SIZE = 2, 16, 2, 8


def metadata_class() -> type:
    try:
        from lmcache.v1.metadata import LMCacheMetadata

        return LMCacheMetadata
    except ImportError:
        from lmcache.config import LMCacheEngineMetadata

        return LMCacheEngineMetadata


def metadata(**more: Any) -> Any:
    """Return the metadata of one worker of a small bfloat16 model."""
    kind = metadata_class()
    facts = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "fmt": "vllm",
        "kv_dtype": torch.bfloat16,
        "kv_shape": (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE),
        **more,
    }
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in facts.items() if name in known})


def config(**more: Any) -> Any:
    """Return a configuration with the trial's Redis as the remote store."""
    from lmcache.v1.config import LMCacheEngineConfig

    settings = {
        "chunk_size": CHUNK,
        "local_cpu": False,
        "max_local_cpu_size": 0.01,
        "remote_url": f"redis://127.0.0.1:{os.environ['REDIS_PORT']}",
        "remote_serde": "naive",
        **more,
    }
    return LMCacheEngineConfig.from_defaults(**settings)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread, as LMCache's storage manager has one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def remote_backend(settings: Any, facts: Any) -> Any:
    """Return a remote backend with a staging pool of its own."""
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    pool = LocalCPUBackend(settings, facts, dst_device="cpu")
    return RemoteBackend(settings, facts, running_loop(), pool, dst_device="cpu")


def key(chunk_hash: int, **more: Any) -> Any:
    """Return the key of a chunk."""
    from lmcache.utils import CacheEngineKey

    facts = {
        "fmt": "vllm",
        "model_name": "m",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": chunk_hash,
        "dtype": torch.bfloat16,
        **more,
    }
    known = {field.name for field in dataclasses.fields(CacheEngineKey)}
    return CacheEngineKey(**{name: value for name, value in facts.items() if name in known})


def chunk(backend: Any, fill: int = 1) -> Any:
    """Return a chunk's memory object from the backend's staging pool, filled."""
    from lmcache.v1.memory_management import MemoryFormat

    shape = torch.Size((2, LAYERS, CHUNK, HEADS * HEAD_SIZE))
    pool = backend.local_cpu_backend
    memory_obj = pool.allocate(shape, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
    memory_obj.tensor.fill_(fill)
    return memory_obj


def redis_path_config(url: str, **more):
    """Return LMCache's configuration for the kit's plug-in; `extra` is for the plug-in itself."""
    from lmcache.v1.config import LMCacheEngineConfig

    extra = {
        "storage_plugin.pdkit.module_path": "pdkit_connector.redis_path.backend",
        "storage_plugin.pdkit.class_name": "RedisPath",
        "pdkit.url": url,
        "pdkit.namespace": "pdkit:test:0",
        **more.pop("extra", {}),
    }
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.01, storage_plugins=["pdkit"],
        extra_config=extra, **more,
    )  # fmt: skip
