"""The Redis path as LMCache's in-process mode sees it: a storage plug-in.

LMCache's configuration names it (`storage_plugins`) and gives its settings under `extra_config`:

    pdkit.url           address of Redis (see `servers`), or a list: keys are spread over all
    pdkit.namespace     prefix of every key; engines with the same namespace share KV
    pdkit.mac_key_file  a file with a secret, by which values have a MAC instead of a checksum
    pdkit.<limit>       a field of `settings.Limits`

Every chunk, or layer of a chunk in layerwise mode, is one value.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from pdkit_connector import store_barrier
from pdkit_connector.counters import COUNTERS
from pdkit_connector.errors import ConnectorError
from pdkit_connector.kv_report import public_address
from pdkit_connector.redis_path.info import SERVERS
from pdkit_connector.redis_path.protocol import Deadline
from pdkit_connector.redis_path.settings import (
    failures,
    limits_of,
    read_settings,
    required,
    secret_of,
    urls_of,
)
from pdkit_connector.redis_path.transfer import Client, refuse_bad_login
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Codec, Header, digest
from pdkit_connector.registry import describe

_RESULTS = {
    "store": ("stored", "failed", "late", "paused", "no_room"),
    "load": ("loaded", "missing", "corrupt", "foreign", "paused", "no_memory"),
}
_ALLOCATE_WAIT_S = 0.01


class RedisPath(StoragePluginInterface):  # type: ignore[misc]
    """LMCache's storage plug-in for Redis. The scheduler's has no memory and only looks up."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        **_newer: Any,
    ) -> None:
        """Create the client and try it once.

        Raises ConnectorError if a setting is wrong or Redis refuses the log-in. A Redis that does
        not answer is not an error: it may start later.
        """
        super().__init__(
            dst_device=dst_device,
            config=config,
            metadata=metadata,
            local_cpu_backend=local_cpu_backend,
            loop=loop,
        )
        try:
            self._start(config, metadata)
        except Exception as exc:
            failures.append(describe(exc))
            raise

    def _start(self, config: Any, metadata: Any) -> None:
        settings = read_settings(config)
        self._codec = Codec(layout_of(config, metadata), secret=secret_of(settings))
        self._namespace = str(required(settings, "namespace"))
        self._urls = urls_of(settings)
        self._names = Names(
            f"{self._namespace}:{self._codec.layout.hex()[:8]}:",
            # All ranks of an MLA model hold the same KV, and LMCache stores that of the first.
            first_rank_only=bool(metadata.use_mla and metadata.world_size > 1),
        )
        self._client = Client(self._urls, self._codec, COUNTERS, limits_of(settings))
        self._tensors = OwnTensors(config, metadata)
        # All values have the same length, known from the first one that fits this engine.
        self._value_bytes: int | None = None
        self._storing: set[Any] = set()
        # The page shows from the start that this engine has such a path. A count that appears with
        # its first event would hide that event from Prometheus.
        for operation, results in _RESULTS.items():
            for result in results:
                COUNTERS.add("chunks", 0, operation=operation, result=result)
        COUNTERS.add("replaced", 0)
        SERVERS.watch(self._client.shards)
        refuse_bad_login(self._client)
        if self.local_cpu_backend is not None:  # else no values move
            self._client.open()

    def pdkit_facts(self) -> dict[str, str]:
        """Return the facts about Redis for `kv_report`."""
        return {
            "redis": ", ".join(map(public_address, self._urls)),
            "namespace": self._namespace,
            "layout": self._codec.layout.hex()[:8],
            "checksum": self._codec.algorithm,
        }

    def __str__(self) -> str:
        return type(self).__name__

    # Lookup

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Tell whether Redis has a key; nothing is pinned there."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:  # noqa: ARG002
        """Count the keys that Redis has, up to the first that it lacks; nothing is pinned there."""
        return self._client.lookups.held(self._names.many(keys), self._value_bytes)

    async def batched_async_contains(
        self,
        lookup_id: str,  # noqa: ARG002
        keys: Sequence[Any],
        pin: bool = False,
    ) -> int:
        """Do what `batched_contains` does, without holding up LMCache's loop."""
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    # Load

    def get_blocking(self, key: Any) -> Any | None:
        """Return a chunk's memory object, or None."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any | None]:
        """Return the memory objects of the keys; None from the first on that cannot be had."""
        loaded = self._load(keys)
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    async def batched_get_non_blocking(
        self,
        lookup_id: str,  # noqa: ARG002
        keys: Sequence[Any],
        transfer_spec: Any = None,  # noqa: ARG002
    ) -> list[Any]:
        """Return the memory objects of the keys, up to the first that cannot be had."""
        return await asyncio.to_thread(self._load, keys)

    def _load(self, keys: Sequence[Any]) -> list[Any]:
        if self.local_cpu_backend is None:
            return []
        targets = self._client.loads.load(self._names.many(keys), self._allocate)
        return [target.memory_obj for target in targets]

    def _allocate(self, header: Header, deadline: Deadline) -> _Staged | None:
        """Return staging memory for the tensor of a header; None if there is none free.

        Waits until the deadline while stores are running, since they free theirs.
        """
        shape, dtype, memory_format = self._tensors.of(header)
        while True:
            waits = bool(self._storing)
            memory_obj = self.local_cpu_backend.allocate(
                shape, dtype, fmt=memory_format, busy_loop=False
            )
            if memory_obj is not None:
                self._value_bytes = HEADER_BYTES + header.payload_bytes
                return _Staged(memory_obj)
            if not waits:
                return None
            try:
                time.sleep(min(_ALLOCATE_WAIT_S, deadline.left_s()))
            except TimeoutError:
                return None

    # Store

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Tell whether a key is being stored."""
        return key in self._storing

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: Sequence[Any],
        transfer_spec: Any = None,  # noqa: ARG002
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Begin to store memory objects, and hold them until each is stored or has failed."""
        for key, memory_obj in zip(keys, objs, strict=True):
            if key not in self._storing:
                self._submit(key, memory_obj, on_complete_callback)

    def _submit(self, key: Any, memory_obj: Any, on_stored: Callable[[Any], None] | None) -> None:
        name = self._names.one(key)
        payload = _bytes_of(memory_obj)
        self._value_bytes = HEADER_BYTES + len(payload)
        header = Header(
            dtype=str(memory_obj.metadata.dtype).removeprefix("torch."),
            shape=tuple(memory_obj.metadata.shape),
            memory_format=memory_obj.metadata.fmt.value,
            payload_bytes=len(payload),
            layout=self._codec.layout,
            key=digest(name),
        )
        token = store_barrier.begin()
        self._storing.add(key)
        memory_obj.ref_count_up()

        def done(stored: bool) -> None:
            self._storing.discard(key)
            memory_obj.ref_count_down()
            store_barrier.end(token)
            if stored and on_stored is not None:
                on_stored(key)

        if not self._client.stores.store(name, header, payload, done):
            done(False)

    # The rest of LMCache's interface

    def pin(self, key: Any) -> bool:  # noqa: ARG002
        """Return True: Redis keeps what is used."""
        return True

    def unpin(self, key: Any) -> bool:  # noqa: ARG002
        """Return True: nothing was pinned."""
        return True

    def remove(self, key: Any, force: bool = True) -> bool:  # noqa: ARG002
        """Remove a key; tell whether it was there."""
        return self._client.lookups.remove([self._names.one(key)]) == 1

    def batched_remove(self, keys: Sequence[Any], force: bool = True) -> int:  # noqa: ARG002
        """Remove keys; return how many were there."""
        return self._client.lookups.remove(self._names.many(keys))

    def touch_cache(self) -> None:
        """Do nothing: Redis records each use itself."""

    def get_allocator_backend(self) -> Any:
        """Return the staging pool."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Finish running stores, within their time limit."""
        self._client.close()


class _Staged:
    """A memory object of the staging pool."""

    def __init__(self, memory_obj: Any) -> None:
        self.memory_obj = memory_obj

    def memory(self) -> memoryview:
        return _bytes_of(self.memory_obj)

    def release(self) -> None:
        self.memory_obj.ref_count_down()


def _bytes_of(memory_obj: Any) -> memoryview:
    return memoryview(memory_obj.byte_array).cast("B")


def layout_of(config: Any, metadata: Any) -> str:
    """Return everything that the meaning of a chunk's bytes depends on, beyond its key."""
    return json.dumps(
        {
            "kv_shape": list(metadata.kv_shape),
            "dtype": str(metadata.kv_dtype),
            "mla": bool(metadata.use_mla),
            "world_size": metadata.world_size,
            "chunk_size": config.chunk_size,
            "layerwise": bool(config.use_layerwise),
        },
        sort_keys=True,
    )


# The parts of LMCache's text of a key, beside its hash.
_ALIKE = attrgetter("__class__", "model_name", "world_size", "worker_id", "dtype", "tags")
_KNOWN = {
    "model_name", "world_size", "worker_id", "chunk_hash", "dtype",
    "request_configs", "tags", "_dtype_str",
}  # fmt: skip
# Keys of another release may have more parts.
_KNOWS_ALL = set(getattr(CacheEngineKey, "__dataclass_fields__", ())) == _KNOWN


class Names:
    """Turns keys into names with a prefix."""

    def __init__(self, prefix: str, *, first_rank_only: bool) -> None:
        """With `first_rank_only`, give the keys of all ranks the names of the first rank's."""
        self._prefix = prefix
        self._first_rank_only = first_rank_only

    def one(self, key: Any) -> bytes:
        """Return the name of a key."""
        if self._first_rank_only:
            key = key.with_new_worker_id(0)
        return f"{self._prefix}{key.to_string()}".encode()

    def many(self, keys: Sequence[Any]) -> list[bytes]:
        """Return the names of keys.

        The keys of a prompt differ in their hashes only, so LMCache turns just one of them into
        text: for all, that would take three times as long as the rest of a lookup.
        """
        return self._alike(keys) or [self.one(key) for key in keys]

    def _alike(self, keys: Sequence[Any]) -> list[bytes]:
        """Return the names of keys that differ in their hashes only; nothing if more differs."""
        if not _KNOWS_ALL or not keys:
            return []
        first = keys[0]
        try:
            facts = list(map(_ALIKE, keys))
            if type(first) is not CacheEngineKey or facts.count(facts[0]) < len(facts):
                return []
            spelled, mark = self.one(first), b"@%x@" % first.chunk_hash
            if spelled.count(mark) != 1:
                return []
            # From the right: the rank before the hash may be the same number.
            head, _, tail = spelled.rpartition(mark)
            names = [b"%b@%x@%b" % (head, key.chunk_hash, tail) for key in keys]
        except TypeError:  # a tag that has no hash, or hashes that are bytes
            return []
        return names if names[-1] == self.one(keys[-1]) else []


TensorType = tuple[torch.Size, torch.dtype, MemoryFormat]
# How a header describes a tensor: dtype, shape, format, bytes.
_Description = tuple[str, tuple[int, ...], int, int]


class OwnTensors:
    """What one value of this engine may hold: a whole chunk, or a layer of it."""

    def __init__(self, config: Any, metadata: Any) -> None:
        """Raise ConnectorError if values could have any length."""
        if config.save_unfull_chunk:
            raise ConnectorError(
                "save_unfull_chunk: true does not work with the Redis path: only the value "
                "itself would show how many tokens it has; set save_unfull_chunk: false"
            )
        self._config = config
        self._metadata = metadata
        self._known: dict[_Description, TensorType] = {}

    def of(self, header: Header) -> TensorType:
        """Return the tensor that a header describes; raise BadValue if it does not fit."""
        described = (header.dtype, header.shape, header.memory_format, header.payload_bytes)
        if described not in self._known:
            # LMCache looks at vLLM's tensors only when it first moves KV.
            self._known = dict(self._all())
        try:
            return self._known[described]
        except KeyError:
            raise BadValue(
                "foreign",
                f"it holds {header.payload_bytes} bytes of {header.dtype} {header.shape}, unlike "
                "any chunk of this engine",
            ) from None

    def _all(self) -> Iterator[tuple[_Description, TensorType]]:
        memory_format = self._format()
        for shape, dtype in self._shapes():
            name = str(dtype).removeprefix("torch.")
            size = shape.numel() * dtype.itemsize
            yield (name, tuple(shape), memory_format.value, size), (shape, dtype, memory_format)

    def _format(self) -> MemoryFormat:
        if self._metadata.use_mla:
            return MemoryFormat.KV_MLA_FMT
        if not self._config.use_layerwise:
            return MemoryFormat.KV_2LTD
        return MemoryFormat.KV_2TD if self._config.enable_blending else MemoryFormat.KV_T2D

    def _shapes(self) -> Iterator[tuple[torch.Size, torch.dtype]]:
        facts, tokens = self._metadata, self._config.chunk_size
        layers, planes, _, heads, head_size = facts.kv_shape
        hidden = heads * head_size
        if self._config.use_layerwise:
            of_layer = {
                MemoryFormat.KV_MLA_FMT: (tokens, hidden),
                MemoryFormat.KV_2TD: (planes, tokens, hidden),
                MemoryFormat.KV_T2D: (tokens, planes, hidden),
            }
            yield torch.Size(of_layer[self._format()]), facts.kv_dtype
            return
        yield torch.Size((planes, layers, tokens, hidden)), facts.kv_dtype
        # What vLLM's own tensors are, where LMCache has looked. Several groups of layers are
        # several tensors, for which a header has no room.
        if hasattr(facts, "get_shapes") and len(shapes := facts.get_shapes(tokens)) == 1:
            yield shapes[0], facts.get_dtypes()[0]
