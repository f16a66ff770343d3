"""Which stores LMCache's server has under way: to its memory, and from there to Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.v1.distributed.storage_controllers import store_controller
from lmcache.v1.periodic_thread import PeriodicThreadRegistry

from pdkit_connector.stores_socket import MEMORY, REDIS, serve

# LMCache's thread that notes every five milliseconds what was written.
_NOTES = "DeviceHostFuncDispatcher"


class NotedKeys(store_controller.StoreListener):  # type: ignore[misc]
    """LMCache's queue from its memory to Redis, which also knows what comes before and after it.

    Every key is in the next place before it leaves the one where it was.

    Attributes:
        taken: what left the queue, and may not have been submitted to Redis.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reserved: set[Any] = set()
        self.taken: Sequence[Any] = ()

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        """Note what is being written to memory."""
        self._reserved.update(keys)

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        """Note what was written."""
        super().on_l1_keys_write_finished(keys)
        self._reserved.difference_update(keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        """Note what was loaded from Redis."""
        self._reserved.difference_update(keys)

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        """Note what was given up."""
        self._reserved.difference_update(keys)

    def pop_pending_keys(self) -> list[Any]:
        """Take the queue."""
        with self._lock:
            self.taken, self._pending_keys = self._pending_keys, []
            return list(self.taken)

    def being_written(self) -> set[Any]:
        """Return the keys that cannot be read from memory yet."""
        return self._reserved.copy()

    def queued(self) -> set[Any]:
        """Return the keys that wait to be submitted to Redis."""
        with self._lock:
            return {*self._pending_keys, *self.taken}


class NotedStores:
    """The stores of a server's controllers."""

    def __init__(self) -> None:
        self._controllers: list[Any] = []

    def add(self, controller: Any) -> None:
        """Note the stores of a controller, too."""
        self._controllers.append(controller)

    def to_memory(self) -> set[Any]:
        """Return the keys that engines of this host cannot load yet."""
        if notes := PeriodicThreadRegistry.get_instance().get(_NOTES):
            notes.wake()
        return {key for one in self._controllers for key in one._listener.being_written()}

    def to_redis(self) -> set[Any]:
        """Return the keys that engines of other hosts cannot load yet."""
        keys = self.to_memory()
        for one in self._controllers:
            keys |= one._listener.queued()
            keys.update(key for task in one._in_flight_tasks.copy().values() for key in task.keys)
        return keys


def answer_engines(requests: str) -> None:
    """Have the server of this process tell engines when stores have ended, before it starts.

    Raises:
        AttributeError: this LMCache has no such server.
    """
    stores, controller = NotedStores(), store_controller.StoreController
    made, submit = controller.__init__, controller._process_new_keys

    def make(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        stores.add(self)

    def process(self: Any, keys: list[Any]) -> None:
        try:
            submit(self, keys)
        finally:
            self._listener.taken = ()

    store_controller.StoreListener = NotedKeys
    controller.__init__, controller._process_new_keys = make, process
    serve(requests, {MEMORY: stores.to_memory, REDIS: stores.to_redis})
