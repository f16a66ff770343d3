"""Redis as the second tier of LMCache's server: an L2 adapter, by LMCache's plug-in point.

    --l2-adapter '{"type": "plugin", "module_path": "pdkit_connector.redis_path.second_tier",
                   "class_name": "SecondTier", "adapter_params": {"settings_file": FILE}}'

The file is YAML with the settings that `backend` has under `extra_config`. Values, checksums,
limits and servers are the same. Every object of the first tier, such as a chunk of one rank, is one
value. LMCache calls this from threads of its own, and nothing here keeps them waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pdkit_connector.counters import COUNTERS
from pdkit_connector.kv_report import public_address
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.client import Client, refuse_bad_login
from pdkit_connector.redis_path.objects import ObjectNames, group_of, header_of, object_layout
from pdkit_connector.redis_path.servers import SERVERS
from pdkit_connector.redis_path.settings import (
    limits_of,
    required,
    secret_of,
    settings_in,
    urls_of,
)
from pdkit_connector.redis_path.tasks import Buffers, Results, TaskStores
from pdkit_connector.redis_path.value import Codec, Header

# LMCache's own default for prompts that are looked up and loaded at once.
_LOADS = 8
_RESULTS = {
    "store": ("stored", "failed", "late", "paused", "unfit"),
    "load": ("loaded", "missing", "corrupt", "foreign", "paused", "unread"),
    "lookup": ("hit", "miss"),
}


class SecondTier(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's L2 adapter for Redis. What Redis does not have, or not whole, is a miss."""

    def __init__(
        self,
        params: Mapping[str, Any],
        l1_memory_desc: Any = None,  # noqa: ARG002 - what is loaded goes through the objects
        **_newer: Any,
    ) -> None:
        """Create the client and try it once.

        Raises ConnectorError if a setting is wrong or Redis refuses the log-in. A Redis that does
        not answer is not an error: it may start later.
        """
        super().__init__()
        settings = settings_in(Path(str(required(params, "settings_file"))))
        self._codec = Codec(object_layout(), secret=secret_of(settings))
        self._urls = urls_of(settings)
        namespace = required(settings, "namespace")
        self._names = ObjectNames(f"{namespace}:{self._codec.layout.hex()[:8]}:")
        self._client = Client(self._urls, self._codec, COUNTERS, limits_of(settings))
        for operation, results in _RESULTS.items():
            for result in results:
                COUNTERS.add("chunks", 0, operation=operation, result=result)
        COUNTERS.add("replaced", 0)
        refuse_bad_login(self._client)
        self._client.open()
        SERVERS.watch(self._client.shards)
        self._tasks = itertools.count()
        self._stored: Results[Any] = Results()
        self._found: Results[Any] = Results()
        self._loaded: Results[Any] = Results()
        self._asking = ThreadPoolExecutor(1, "pdkit-second-tier-lookup")
        self._loading = ThreadPoolExecutor(_LOADS, "pdkit-second-tier-load")

    def get_store_event_fd(self) -> int:
        """Return what is readable when a store has ended."""
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return what is readable when a lookup has ended."""
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        """Return what is readable when a load has ended."""
        return self._loaded.fileno()

    # Store

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to store objects, which must not change until the task has ended."""
        task = next(self._tasks)
        values = [self._value(key, one) for key, one in zip(keys, objects, strict=True)]
        stores = TaskStores([len(payload) for _, _, payload in values], partial(self._told, task))
        for name, header, payload in values:
            done = stores.done(len(payload))
            if not self._client.stores.store(name, header, payload, done):
                done(False)
        return task

    def _value(self, key: Any, memory_obj: Any) -> tuple[bytes, Header, memoryview]:
        name = self._names.of_object(key, memory_obj)
        return name, header_of(memory_obj, name, self._codec), _bytes_of(memory_obj)

    def _told(self, task: int, stored: int, whole: bool) -> None:
        self._stored.put(task, L2StoreResult(whole, stored))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the stores that have ended since the last call."""
        return self._stored.pop_all()

    # Lookup. Nothing is locked: Redis keeps what is used.

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Begin to find out which objects Redis has, of the shapes that are asked for."""
        task = next(self._tasks)
        self._asking.submit(self._look_up, task, tuple(keys), dict(group_layout_descs))
        return task

    def _look_up(self, task: int, keys: Sequence[Any], layouts: Mapping[int, Any]) -> None:
        found = Bitmap(len(keys))
        try:
            for index in self.held(keys, layouts):
                found.set(index)
        except Exception:  # noqa: BLE001 - LMCache waits for an answer
            get_logger().exception("pdkit-connector ERROR Redis: a lookup failed")
        self._found.put(task, found)

    def held(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> list[int]:
        """Return which of the keys, by index, Redis has a value for, of the right length."""
        known = [
            (index, *named)
            for index, key in enumerate(keys)
            if (named := self._names.of_key(key, layouts.get(key.object_group_id)))
        ]
        names, sizes = [name for _, name, _ in known], [size for *_, size in known]
        each = self._client.lookups.each(names, sizes)
        return [index for (index, *_), is_there in zip(known, each, strict=True) if is_there]

    def query_lookup_and_lock_result(self, task_id: int) -> Any | None:
        """Return what a lookup found; None while it has not ended."""
        return self._found.pop(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Do nothing: nothing was locked."""

    # Load

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to fill objects; nothing writes to them once the task has ended."""
        task = next(self._tasks)
        self._loading.submit(self._load, task, tuple(keys), tuple(objects))
        return task

    def _load(self, task: int, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        loaded = Bitmap(len(keys))
        try:
            for row in _rows(keys):
                own = [(keys[index], objects[index]) for index in row]
                for index in row[: self._load_row(own)]:
                    loaded.set(index)
        except Exception:  # noqa: BLE001 - LMCache waits for an answer
            get_logger().exception("pdkit-connector ERROR Redis: a load failed")
        self._loaded.put(task, loaded)

    def _load_row(self, own: Sequence[tuple[Any, Any]]) -> int:
        """Fill objects of one rank in their order; return how many, from the first on, are."""
        names = [self._names.of_object(key, memory_obj) for key, memory_obj in own]
        headers = [header_of(o, name, self._codec) for (_, o), name in zip(own, names, strict=True)]
        buffers = Buffers(headers, [_bytes_of(memory_obj) for _, memory_obj in own])
        filled = 0
        try:
            filled = len(self._client.loads.load(names, buffers.take))
        finally:
            buffers.wait(filled)
        return filled

    def query_load_result(self, task_id: int) -> Any | None:
        """Return what a load filled; None while it has not ended."""
        return self._loaded.pop(task_id)

    # The rest of LMCache's interface. What is stored is not reported to the base class, which would
    # add up bytes that Redis evicts without a word.

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove objects."""
        named = (self._names.of_key(key, None) for key in keys)
        self._client.lookups.remove([one[0] for one in named if one])

    def report_status(self) -> dict[str, Any]:
        """Return where Redis is. Without it the server is well: it has its first tier."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "redis": ", ".join(map(public_address, self._urls)),
            "checksum": self._codec.algorithm,
        }

    def close(self) -> None:
        """Finish what is under way, within its limits."""
        self._asking.shutdown(cancel_futures=True)
        self._loading.shutdown(cancel_futures=True)
        self._client.close()
        for results in (self._stored, self._found, self._loaded):
            results.close()


def _rows(keys: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the keys of each rank and group of layers, in their order."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(group_of(key), []).append(index)
    return list(rows.values())


def _bytes_of(memory_obj: Any) -> memoryview:
    return memoryview(memory_obj.byte_array).cast("B")
