"""Which stores LMCache's server has under way: to its memory, and from there to Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lmcache.v1.distributed.storage_controllers import store_controller
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.periodic_thread import PeriodicThreadRegistry

from pdkit_connector.server_sockets import REDIS, serve

# LMCache's thread that notes every five milliseconds what was written.
_NOTES = "DeviceHostFuncDispatcher"
_TICK_S = 0.002


class CountedQueue(store_controller.StoreListener):  # type: ignore[misc]
    """LMCache's queue of chunks that were written to memory, and go to Redis in this order.

    Attributes:
        queued, submitted: how many were put into it since the start, and how many LMCache then gave
            to Redis' client, or left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queued = self.submitted = 0

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        """Queue chunks; LMCache holds a lock meanwhile."""
        super().on_l1_keys_write_finished(keys)
        self.queued += len(keys)


class NotedStores:
    """The stores of all engines. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Chunks that are being written to memory: which one it is since the start, and when it
        # began. The oldest is the first.
        self._writes: dict[Any, tuple[int, float]] = {}
        self._begun = 0
        self._controllers: list[Any] = []

    def add(self, controller: Any) -> None:
        """Note what a controller stores in Redis."""
        self._controllers.append(controller)

    def begin(self, keys: Iterable[Any]) -> None:
        """Note chunks that are being written to memory."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                self._begun += 1
                self._writes.pop(key, None)
                self._writes[key] = self._begun, now

    def end(self, keys: Iterable[Any]) -> None:
        """Note chunks that can be read, or never will be."""
        with self._lock:
            for key in keys:
                self._writes.pop(key, None)

    async def wait(self, where: str, limit_s: float, whole_s: float) -> bool:
        """Wait until the stores of this moment have ended; False if they have not in time.

        Args:
            where: MEMORY or REDIS.
            limit_s: how long to wait.
            whole_s: after how long a write that hangs is given up, also by those who ask later.
        """
        until, begun = time.monotonic() + limit_s, self._begun
        if notes := PeriodicThreadRegistry.get_instance().get(_NOTES):
            notes.wake()
        if not await _holds(lambda: self._written(begun, whole_s), until):
            return False
        return where != REDIS or all([await _in_redis(one, until) for one in self._controllers])

    def _written(self, begun: int, whole_s: float) -> bool:
        """Tell whether none of so many writes is under way that began less than this ago."""
        oldest = time.monotonic() - whole_s
        with self._lock:
            while self._writes:
                key, (number, at) = next(iter(self._writes.items()))
                if number > begun:
                    return True
                if at > oldest:
                    return False
                del self._writes[key]
        return True


async def _in_redis(controller: Any, until: float) -> bool:
    queue = controller._listener
    queued = queue.queued
    if not await _holds(lambda: queue.submitted >= queued, until):
        return False
    tasks = set(controller._in_flight_tasks.copy())
    return await _holds(lambda: tasks.isdisjoint(controller._in_flight_tasks.copy()), until)


async def _holds(condition: Callable[[], bool], until: float) -> bool:
    while not condition():
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(_TICK_S)
    return True


def answer_engines(requests: str) -> None:
    """Have the server of this process tell engines when stores have ended, before it starts.

    Raises:
        AttributeError: this LMCache has no such server.
        OSError: the socket cannot be made.
    """
    stores, controller = NotedStores(), store_controller.StoreController
    made, submit = controller.__init__, controller._process_new_keys
    reserve, finish = StorageManager.reserve_write, StorageManager.finish_write_by_owner

    def make(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        stores.add(self)

    def process(self: Any, keys: list[Any]) -> None:
        try:
            submit(self, keys)
        finally:
            self._listener.submitted += len(keys)

    def reserve_write(self: Any, *args: Any, **named: Any) -> Any:
        reserved = reserve(self, *args, **named)
        stores.begin(reserved)
        return reserved

    def finish_write(self: Any, completion: Any) -> None:
        try:
            finish(self, completion)
        finally:
            stores.end(key for _, keys in completion for key in keys)

    store_controller.StoreListener = CountedQueue
    controller.__init__, controller._process_new_keys = make, process
    StorageManager.reserve_write = reserve_write
    StorageManager.finish_write_by_owner = finish_write
    serve(requests, stores.wait)
