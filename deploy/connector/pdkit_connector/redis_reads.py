"""Reads of many chunks at once through LMCache's Redis connectors, on LMCache's event loop.

A chunk is two keys, `<key>metadata` and `<key>kv_bytes`, which Redis can evict apart. A read gives
the contiguous prefix of what was asked for: what follows a missing chunk is of no use to vLLM.
Nothing here sleeps on the loop or waits without a limit, and nothing that a read took from the
staging pool stays taken when the read fails or is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdkit_connector.log import get_logger
from pdkit_connector.registry import describe

METADATA, PAYLOAD = "metadata", "kv_bytes"
DEFAULT_TIMEOUT_S = 10.0

# Bytes of one pipelined answer, beyond which a round trip is the lesser cost.
_BATCH_BYTES = 4 << 20
_POLL_S = 0.02


def timeout_s(config: Any) -> float:
    """Return LMCache's own limit on blocking reads, in seconds."""
    limit = getattr(config, "blocking_timeout_secs", None)
    return DEFAULT_TIMEOUT_S if limit is None else float(limit)


def connectors() -> tuple[type, ...]:
    """Return LMCache's connectors that wait for their client; sentinel's never does (B9)."""
    from lmcache.v1.storage_backend.connector import redis_connector

    return redis_connector.RedisConnector, redis_connector.RedisClusterConnector


def client_of(connector: Any) -> Any:
    """Return the Redis client of a connector."""
    return connector.cluster if hasattr(connector, "cluster") else connector.connection


async def pipelined(connector: Any, command: str, names: Sequence[str]) -> list[Any]:
    """Send `command` for every name in one round trip (one for each node of a cluster)."""
    async with connector.sem:
        pipe = client_of(connector).pipeline(transaction=False)
        for name in names:
            getattr(pipe, command)(name)
        return list(await pipe.execute())


async def count_prefix(connector: Any, keys: Sequence[Any]) -> int:
    """Return how many of `keys` are in Redis before the first that is not; one round trip."""
    if not keys:
        return 0
    found = await pipelined(connector, "exists", [key.to_string() + METADATA for key in keys])
    return next((at for at, exists in enumerate(found) if not exists), len(keys))


async def read_prefix(connector: Any, keys: Sequence[Any]) -> list[Any]:
    """Return the memory objects of `keys` up to the first that cannot be had whole.

    Raises what the client raises; then, and when cancelled, nothing stays allocated.
    """
    if not keys:
        return []
    names = [key.to_string() for key in keys]
    raw = await pipelined(connector, "get", [name + METADATA for name in names])
    facts = list(_parsed(raw))
    memory_objs: list[Any] = []
    try:
        await _allocate_all(connector.local_cpu_backend, facts, memory_objs)
        chunks = [_Chunk(*parts) for parts in zip(names, facts, memory_objs, strict=False)]
        await _fill(connector, chunks)
        whole = next((at for at, chunk in enumerate(chunks) if not chunk.whole), len(chunks))
        if whole < len(chunks) and chunks[whole].gone:
            await _forget(connector, names[whole])
    except BaseException:
        release(memory_objs)
        raise
    release(memory_objs[whole:])
    return memory_objs[:whole]


def release(memory_objs: Iterable[Any]) -> None:
    """Give memory objects back to the staging pool."""
    for memory_obj in memory_objs:
        if memory_obj is not None:
            memory_obj.ref_count_down()


def _parsed(raw: Iterable[bytes | None]) -> Iterator[Any]:
    from lmcache.v1.storage_backend.connector import redis_connector

    for text in raw:
        if text is None:
            return
        yield redis_connector.RemoteMetadata.deserialize(memoryview(text))


async def _allocate_all(pool: Any, facts: Sequence[Any], taken: list[Any]) -> None:
    """Append a memory object for each of `facts` to `taken` until the pool has none in time.

    Half the caller's own limit is left for the transfer.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + timeout_s(getattr(pool, "config", None)) / 2
    for fact in facts:
        while (memory_obj := _allocate(pool, fact)) is None:
            if clock() >= until:
                get_logger().warning(
                    "pdkit-connector WARNING no staging memory for %d of %d chunks: a miss",
                    len(facts) - len(taken),
                    len(facts),
                )
                return
            await asyncio.sleep(_POLL_S)
        taken.append(memory_obj)


def _allocate(pool: Any, fact: Any) -> Any:
    # Releases before 0.3.12 know one shape and one data type an object.
    shapes = fact.shapes if hasattr(fact, "shapes") else fact.shape
    dtypes = fact.dtypes if hasattr(fact, "dtypes") else fact.dtype
    return pool.allocate(shapes, dtypes, fact.fmt, busy_loop=False)


@dataclass
class _Chunk:
    """One chunk that is read: where it is in Redis, what it is, and what it is copied into."""

    name: str
    fact: Any
    memory_obj: Any
    whole: bool = False
    gone: bool = False

    def fill(self, payload: bytes | None) -> None:
        """Copy a payload into the memory object, unless it is not all of the chunk."""
        self.gone = payload is None
        view = memoryview(self.memory_obj.byte_array)
        view = view if view.format == "B" else view.cast("B")
        length = self.fact.length
        if (
            payload is None
            or len(payload) != length
            or not self.memory_obj.get_size() <= length <= len(view)
        ):
            return
        view[:length] = payload
        self.whole = True


async def _fill(connector: Any, chunks: Sequence[_Chunk]) -> None:
    """Fill chunks with their payloads, up to the first that is not whole.

    One answer at a time: each is copied while it is in the processor's cache, and its memory serves
    the next. Several at once keep the only thread that reads them no busier, and take a fifth more.
    """
    for batch in _batches(chunks):
        payloads = await pipelined(connector, "get", [chunk.name + PAYLOAD for chunk in batch])
        for chunk in batch:
            # Taken off the list, so that the payload is freed before the next is read.
            chunk.fill(payloads.pop(0))
            if not chunk.whole:
                return


def _batches(chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
    batch: list[_Chunk] = []
    size = 0
    for chunk in chunks:
        if batch and size + chunk.fact.length > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk.fact.length
    if batch:
        yield batch


async def _forget(connector: Any, name: str) -> None:
    """Delete the metadata of a payload that Redis evicted, so that lookups stop finding it."""
    try:
        async with connector.sem:
            await client_of(connector).delete(name + METADATA)
    except Exception as exc:  # noqa: BLE001 - what was read stays good
        get_logger().warning("pdkit-connector WARNING cannot delete: %s", describe(exc))
