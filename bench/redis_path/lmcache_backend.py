"""A storage backend of LMCache, driven as its engine does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from bench.redis_path.contender import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    MIB,
    PATIENCE_S,
    TINY_BYTES,
    Span,
    Where,
    measured,
)

_POOL_SPARE_BYTES = 64 * MIB


class LmcacheBackend:
    """A storage backend of LMCache with a real staging pool; `_backend` makes it."""

    scheme = "redis"
    extra_config: dict[str, Any] | None = None

    def __init__(self, where: Where, engine: int) -> None:
        self._where = where
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._allocator: Any = None
        self.backend: Any = None

    def open(self, value_bytes: int, count: int) -> None:
        # The backend before is left as it is: stock LMCache's `close` waits for itself, forever.
        self._make(value_bytes, count)
        self._keys = [self._key(number) for number in range(count)]

    def _make(self, value_bytes: int, count: int) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        layers, chunk, heads, size = _shape(value_bytes)
        self._tensor_shape = torch.Size((2, layers, chunk, heads * size))
        pool_bytes = value_bytes * count + _POOL_SPARE_BYTES
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk, local_cpu=False, save_unfull_chunk=False,
            max_local_cpu_size=max(pool_bytes, 256 * MIB) / (1 << 30),
            remote_url=self._url(), remote_serde="naive", extra_config=self._extra_config(),
        )  # fmt: skip
        facts = LMCacheMetadata(
            model_name=self._model(), world_size=1, local_world_size=1, worker_id=0,
            local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=(layers, 2, chunk, heads, size),
            chunk_size=chunk,
        )  # fmt: skip
        # One pool for all sizes: memory that has been used, as in an engine that runs.
        pool = LocalCPUBackend(config, facts, dst_device="cpu", memory_allocator=self._allocator)
        self._allocator = pool.memory_allocator
        self.backend = self._backend(config, facts, pool)

    def _url(self) -> str | None:
        return f"{self.scheme}://127.0.0.1:{self._where.port}"

    def _extra_config(self) -> dict[str, Any] | None:
        return self.extra_config

    def _model(self) -> str:
        return f"meta-llama/Llama-3.1-8B-Instruct-{type(self).__name__}-{self._engine}"

    def _backend(self, config: Any, facts: Any, pool: Any) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(config, facts, self._loop, pool, dst_device="cpu")

    def _key(self, number: int) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        chunk_hash = 0x9E3779B97F4A7C15 * (number + 1) % (1 << 63)
        return CacheEngineKey(self._model(), 1, 0, chunk_hash, torch.bfloat16)

    def store(self) -> Span:
        objects = [self._filled(number) for number in range(len(self._keys))]
        stored = _Countdown(len(objects))
        with measured() as span:
            self.backend.batched_submit_put_task(
                self._keys, objects, on_complete_callback=stored.one
            )
            stored.wait()
        # Stock LMCache gives the caller's reference back itself; the kit's takes one of its own.
        for memory_obj in objects:
            if memory_obj.get_ref_count() > 0:
                memory_obj.ref_count_down()
        return span

    def _filled(self, number: int) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        memory_obj = self.backend.local_cpu_backend.allocate(
            self._tensor_shape, torch.bfloat16, fmt=MemoryFormat.KV_2LTD
        )
        memory_obj.tensor.fill_(number)
        return memory_obj

    def retrieve(self) -> Span:
        with measured() as span:
            objects = self.backend.batched_get_blocking(self._keys)
        for number, memory_obj in enumerate(objects):
            if memory_obj is None:
                raise RuntimeError(f"value {number} of {len(objects)} is missing")
            ends = memory_obj.tensor.flatten()[[0, -1]]
            if not bool((ends == number).all()):
                raise RuntimeError(f"wrong bytes in value {number}")
            memory_obj.ref_count_down()
        return span

    def lookup(self, count: int) -> Span:
        keys = self._keys[:count]
        with measured() as span:
            found = self.backend.batched_contains(keys)
        if found != count:
            raise RuntimeError(f"{found} of {count} values are there")
        return span


def _shape(value_bytes: int) -> tuple[int, int, int, int]:
    """Return layers, tokens, heads and head size of a chunk."""
    if value_bytes == TINY_BYTES:
        return 1, 16, 2, 8
    return value_bytes // MIB, CHUNK, HEADS, HEAD_SIZE


class _Countdown:
    """Waits until as many values are stored as were handed over."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._none_left = threading.Event()

    def one(self, _key: Any) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._none_left.set()

    def wait(self) -> None:
        if not self._none_left.wait(PATIENCE_S):
            raise RuntimeError(f"{self._left} values were not stored")
