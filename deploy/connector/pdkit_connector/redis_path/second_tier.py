"""Redis as the second tier of LMCache's server: an L2 adapter, by LMCache's plug-in point.

    --l2-adapter '{"type": "plugin", "module_path": "pdkit_connector.redis_path.second_tier",
                   "class_name": "SecondTier", "adapter_params": {"settings_file": FILE}}'

The file is YAML with the settings that `backend` has under `extra_config`. Values, checksums,
limits and servers are the same. Every object of the server, such as a chunk of one rank, is one
value. LMCache calls this from threads of its own, and nothing here keeps them waiting.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from pdkit_connector.counters import COUNTERS
from pdkit_connector.kv_report import public_address
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.info import SERVERS
from pdkit_connector.redis_path.protocol import Deadline
from pdkit_connector.redis_path.settings import limits_of, required, secret_of, settings_in, urls_of
from pdkit_connector.redis_path.transfer import Client, refuse_bad_login
from pdkit_connector.redis_path.value import (
    HEADER_BYTES,
    BadValue,
    Codec,
    Header,
    digest,
    object_layout,
)

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
        """Return the descriptor that is readable when a store has ended."""
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when a lookup has ended."""
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when a load has ended."""
        return self._loaded.fileno()

    # Store

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to store objects, which must not change until the task has ended."""
        task = next(self._tasks)
        values = [self._value(key, one) for key, one in zip(keys, objects, strict=True)]
        stores = TaskStores(
            [len(payload) for _, _, payload in values], partial(self._store_ended, task)
        )
        for name, header, payload in values:
            done = stores.done(len(payload))
            if not self._client.stores.store(name, header, payload, done):
                done(False)
        return task

    def _value(self, key: Any, memory_obj: Any) -> tuple[bytes, Header, memoryview]:
        name = self._names.of_object(key, memory_obj)
        return name, header_of(memory_obj, name, self._codec), _bytes_of(memory_obj)

    def _store_ended(self, task: int, stored: int, whole: bool) -> None:
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
        """Return the indices of the keys for which Redis has a value of the right length."""
        known = [
            (index, *named)
            for index, key in enumerate(keys)
            if (named := self._names.of_key(key, layouts.get(key.object_group_id)))
        ]
        names, sizes = [name for _, name, _ in known], [size for *_, size in known]
        each = self._client.lookups.each(names, sizes)
        return [index for (index, *_), is_there in zip(known, each, strict=True) if is_there]

    def query_lookup_and_lock_result(self, task_id: int) -> Any | None:
        """Return the result of a lookup; None while it runs."""
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
        """Return the result of a load; None while it runs."""
        return self._loaded.pop(task_id)

    # The rest of LMCache's interface. What is stored is not reported to the base class, which would
    # add up bytes that Redis evicts without a word.

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove objects."""
        named = (self._names.of_key(key, None) for key in keys)
        self._client.lookups.remove([one[0] for one in named if one])

    def report_status(self) -> dict[str, Any]:
        """Report the address of Redis. The server is healthy without it: it has its own memory."""
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


# A header has room for one tensor; an object of several is described by its bytes and its name.
_SEVERAL = "several"


class ObjectNames:
    """Turns keys into names with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # By model, rank and group of layers: the objects of a key without a layout.
        self._kinds: dict[tuple[str, int, int], tuple[str, int]] = {}

    def of_object(self, key: Any, memory_obj: Any) -> bytes:
        """Return the name of an object."""
        return self._name(key, _kind(*_tensors(memory_obj)), memory_obj.get_size())

    def of_key(self, key: Any, layout: Any | None) -> tuple[bytes, int] | None:
        """Return the name of a key and the length of its value.

        Args:
            key: LMCache's.
            layout: LMCache's description of the object; without one, what this process last stored
                or asked for is taken.

        Returns:
            None where nothing is known of such objects.
        """
        if layout is not None:
            size = sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
            )
            return self._name(key, _kind(layout.shapes, layout.dtypes), size), HEADER_BYTES + size
        if (known := self._kinds.get(group_of(key))) is None:
            return None
        kind, size = known
        return self._name(key, kind, size), HEADER_BYTES + size

    def _name(self, key: Any, kind: str, size: int) -> bytes:
        self._kinds[group_of(key)] = kind, size
        # No part but the last can have an @ (LMCache refuses it).
        parts = (
            key.model_name, f"{key.kv_rank:x}", str(key.object_group_id), kind,
            key.chunk_hash.hex(), key.cache_salt,
        )  # fmt: skip
        return (self._prefix + "@".join(parts)).encode()


def header_of(memory_obj: Any, name: bytes, codec: Codec) -> Header:
    """Return the header of an object's value."""
    shapes, dtypes = _tensors(memory_obj)
    one = len(shapes) == 1
    return Header(
        dtype=_dtype(dtypes[0]) if one else _SEVERAL,
        shape=tuple(shapes[0]) if one else (len(shapes),),
        memory_format=memory_obj.get_memory_format().value,
        payload_bytes=memory_obj.get_size(),
        layout=codec.layout,
        key=digest(name),
    )


def _tensors(memory_obj: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shapes and data types of what an object holds."""
    facts = memory_obj.metadata
    if facts.shapes is None:
        return [facts.shape], [facts.dtype]
    return facts.shapes, facts.dtypes


def group_of(key: Any) -> tuple[str, int, int]:
    """Return the model, rank and group of layers of a key's object."""
    return key.model_name, key.kv_rank, key.object_group_id


def _kind(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    parts = zip(shapes, dtypes, strict=True)
    return ",".join(f"{_dtype(dtype)}:{'x'.join(map(str, shape))}" for shape, dtype in parts)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


R = TypeVar("R")


class Results(Generic[R]):
    """Results of tasks of one kind, and a file descriptor that signals each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = create_event_notifier()
        self._results: dict[int, R] = {}
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor, which is readable when a task has ended."""
        return int(self._event.fileno())

    def put(self, task: int, result: R) -> None:
        """Take the result of a task; nothing after this is closed."""
        with self._lock:
            if not self._closed:
                self._results[task] = result
                self._event.notify()

    def pop(self, task: int) -> R | None:
        """Return the result of a task, once; None while it runs."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, R]:
        """Return the results of all tasks that have ended since the last call."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._closed = True
            self._event.close()


class TaskStores:
    """The stores of one task: reports their end once, with the bytes that Redis has now."""

    def __init__(self, sizes: Sequence[int], on_end: Callable[[int, bool], None]) -> None:
        self._lock = threading.Lock()
        self._on_end = on_end
        self._left, self._bytes, self._whole = len(sizes), 0, True
        if not sizes:
            on_end(0, True)

    def done(self, size: int) -> Callable[[bool], None]:
        """Return the callback for the end of a store of that many bytes."""

        def ended(stored: bool) -> None:
            with self._lock:
                self._left -= 1
                self._bytes += size if stored else 0
                self._whole = self._whole and stored
                last = not self._left
            if last:
                self._on_end(self._bytes, self._whole)

        return ended


class _Buffer:
    """Memory of the server for one value."""

    def __init__(self, memory: memoryview, given_back: Callable[[], None]) -> None:
        self._memory = memory
        self.release = given_back

    def memory(self) -> memoryview:
        """Return the bytes to write to."""
        return self._memory


class Buffers:
    """The memory of one load. LMCache gives it to others as soon as the load has ended."""

    def __init__(self, headers: Sequence[Header], memory: Sequence[memoryview]) -> None:
        """Take the headers that values must have, and where each goes.

        Raises:
            ValueError: two have one key, so that one would stay empty.
        """
        self._wanted = {of.key: (of, one) for of, one in zip(headers, memory, strict=True)}
        if len(self._wanted) != len(headers):
            raise ValueError("a key twice in one load")
        self._condition = threading.Condition()
        self._taken = 0
        self._ended = False

    def take(self, header: Header, deadline: Deadline) -> _Buffer | None:  # noqa: ARG002
        """Return the memory for a value; raise BadValue if it is not the requested object."""
        wanted, memory = self._wanted[header.key]
        if header != wanted:
            raise BadValue(
                "foreign", f"it holds {header.dtype} {header.shape}, and {wanted.shape} are wanted"
            )
        with self._condition:
            if self._ended:
                return None
            self._taken += 1
        return _Buffer(memory, self._given_back)

    def _given_back(self) -> None:
        with self._condition:
            self._taken -= 1
            self._condition.notify_all()

    def wait(self, filled: int) -> None:
        """Return when nothing writes to the memory any more; every read of a lane has a limit."""
        with self._condition:
            self._ended = True
            self._condition.wait_for(lambda: self._taken == filled)
