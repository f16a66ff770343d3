"""What Redis has, asked over one connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.address import Node
from pdkit_connector.redis_path.attempts import OF_ONE_KEY, Attempts
from pdkit_connector.redis_path.lanes import Links, dropping
from pdkit_connector.redis_path.link import Deadline, ReplyError, command
from pdkit_connector.redis_path.value import HEADER_BYTES

R = TypeVar("R")


class Lookups:
    """Questions and removals; callers take turns."""

    def __init__(self, links: Links, attempts: Attempts, counters: Counters, limit_s: float):
        self._links = links
        self._attempts = attempts
        self._counters = counters
        self._limit_s = limit_s
        self._lock = threading.Lock()

    def held(self, keys: Sequence[bytes], value_bytes: int | None = None) -> int:
        """Return how many keys, from the first on, have a value.

        With `value_bytes`, a value of another length counts as none. One round trip a server.
        """
        began = time.perf_counter()
        lengths = self._in_turn(lambda deadline: self._each(b"STRLEN", keys, deadline))
        found = _prefix(lengths or (), value_bytes)
        self._counters.add("calls", operation="lookup")
        self._counters.add("seconds", time.perf_counter() - began, operation="lookup")
        self._counters.add("chunks", found, operation="lookup", result="hit")
        self._counters.add("chunks", len(keys) - found, operation="lookup", result="miss")
        return found

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove values; return how many there were."""
        return sum(self._in_turn(lambda deadline: self._each(b"UNLINK", keys, deadline)) or ())

    def ping(self) -> None:
        """Ask Redis for a sign of life; raise what went wrong."""
        deadline = Deadline(self._limit_s + 2)
        if not self._lock.acquire(timeout=self._limit_s):
            raise TimeoutError("others ask Redis")
        try:
            node = self._links.route(deadline)(b"")
            with dropping(self._links, node):
                link = self._links.to(node, deadline)
                link.send([command(b"PING")], deadline)
                link.status(deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._links.close()

    def _in_turn(self, work: Callable[[Deadline], R]) -> R | None:
        deadline = Deadline(self._limit_s)
        if self._attempts.pausing() or not self._lock.acquire(timeout=self._limit_s):
            return None
        try:
            # Whoever had the turn before may have found out.
            if self._attempts.pausing() or deadline.passed():
                return None
            return self._attempts.run(lambda: work(deadline), self._links)
        finally:
            self._lock.release()

    def _each(self, name: bytes, keys: Sequence[bytes], deadline: Deadline) -> list[int]:
        """Return the number that a command answers for each key.

        STRLEN, unlike EXISTS, also counts as a use, so that a chunk is not evicted before its load.
        """
        head = b"*2\r\n$%d\r\n%s\r\n" % (len(name), name)
        numbers = [0] * len(keys)
        nodes = self._by_node(keys, deadline)
        with dropping(self._links, *nodes):
            for node, indices in nodes.items():
                # `command`, written out: there may be thousands.
                ours = [keys[i] for i in indices]
                asked = b"".join([b"%s$%d\r\n%s\r\n" % (head, len(key), key) for key in ours])
                self._links.to(node, deadline).send([asked], deadline)
            for node, indices in nodes.items():
                link = self._links.to(node, deadline)
                for i in indices:
                    try:
                        numbers[i] = int(link.status(deadline))
                    except ReplyError as error:
                        if error.code not in OF_ONE_KEY:
                            raise
        return numbers

    def _by_node(self, keys: Sequence[bytes], deadline: Deadline) -> dict[Node, list[int]]:
        route = self._links.route(deadline)
        found: dict[Node, list[int]] = {}
        for i, key in enumerate(keys):
            found.setdefault(route(key), []).append(i)
        return found


def _prefix(lengths: Sequence[int], value_bytes: int | None) -> int:
    for count, length in enumerate(lengths):
        if length < HEADER_BYTES or (value_bytes is not None and length != value_bytes):
            return count
    return len(lengths)
