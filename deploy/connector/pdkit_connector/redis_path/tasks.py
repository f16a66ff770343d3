"""The second tier's running tasks for LMCache, and their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from pdkit_connector.redis_path.link import Deadline
from pdkit_connector.redis_path.value import BadValue, Header

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

    def __init__(self, sizes: Sequence[int], told: Callable[[int, bool], None]) -> None:
        self._lock = threading.Lock()
        self._told = told
        self._left, self._bytes, self._whole = len(sizes), 0, True
        if not sizes:
            told(0, True)

    def done(self, size: int) -> Callable[[bool], None]:
        """Return what is called when a store of that many bytes has ended."""

        def ended(stored: bool) -> None:
            with self._lock:
                self._left -= 1
                self._bytes += size if stored else 0
                self._whole = self._whole and stored
                last = not self._left
            if last:
                self._told(self._bytes, self._whole)

        return ended


class _Buffer:
    """Memory of the first tier for one value."""

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
        """Return where a value goes; raise BadValue if it is not the object that was asked for."""
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
