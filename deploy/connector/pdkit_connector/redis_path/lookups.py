"""Lookups and removals, over connections of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pdkit_connector.counters import Counters, key_of
from pdkit_connector.redis_path.attempts import OF_ONE_KEY
from pdkit_connector.redis_path.lanes import Dropping
from pdkit_connector.redis_path.link import Deadline, ReplyError, command
from pdkit_connector.redis_path.shards import Shard, Shards
from pdkit_connector.redis_path.value import HEADER_BYTES
from pdkit_connector.redis_url import Node

# Time to read an answer that came while another shard used up all of the time.
_GRACE_S = 0.05
# What is counted for each lookup, prepared once.
_CALLS, _SECONDS = key_of("calls", operation="lookup"), key_of("seconds", operation="lookup")
_HITS = key_of("chunks", operation="lookup", result="hit")
_MISSES = key_of("chunks", operation="lookup", result="miss")


class Lookups:
    """Lookups and removals; callers take turns."""

    def __init__(self, shards: Shards, counters: Counters, limit_s: float) -> None:
        self._shards = shards
        self._counters = counters
        self._limit_s = limit_s
        self._lock = threading.Lock()

    def held(self, keys: Sequence[bytes], value_bytes: int | None = None) -> int:
        """Return how many keys, from the first on, have a value.

        With `value_bytes`, a value of another length does not count. One round trip per server.
        """
        began = time.perf_counter()
        found = _prefix(self._each(b"STRLEN", keys), value_bytes)
        self._count(began, found, len(keys))
        return found

    def each(self, keys: Sequence[bytes], value_bytes: Sequence[int]) -> list[bool]:
        """Return for each key whether it has a value of its length, in one round trip."""
        began = time.perf_counter()
        lengths = self._each(b"STRLEN", keys)
        found = [length == wanted for length, wanted in zip(lengths, value_bytes, strict=True)]
        self._count(began, sum(found), len(keys))
        return found

    def _count(self, began: float, found: int, asked: int) -> None:
        seconds = time.perf_counter() - began
        self._counters.add_all(
            ((_CALLS, 1), (_SECONDS, seconds), (_HITS, found), (_MISSES, asked - found))
        )

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove values; return how many there were."""
        return sum(self._each(b"UNLINK", keys))

    def ping(self, shard: Shard | None = None) -> None:
        """Ping a shard, or each in turn; raise the failure."""
        if shard is None:
            for each in self._shards:
                self.ping(each)
            return
        deadline = Deadline(self._limit_s + 2)
        if not self._lock.acquire(timeout=self._limit_s):
            raise TimeoutError("others ask Redis")
        try:
            links = shard.asking
            node = links.route(deadline)(b"")
            with Dropping(links, node):
                link = links.to(node, deadline)
                link.send([command(b"PING")], deadline)
                link.status(deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for shard in self._shards:
                shard.asking.close()

    def _each(self, name: bytes, keys: Sequence[bytes]) -> list[int]:
        """Return the number that a command answers for each key; 0 without an answer.

        STRLEN, unlike EXISTS, also counts as a use, so that a chunk is not evicted before its load.
        """
        numbers = [0] * len(keys)
        deadline = Deadline(self._limit_s)
        parts = _well(self._shards.split(keys))
        if not parts or not self._lock.acquire(timeout=self._limit_s):
            return numbers
        questions: list[_Question] = []
        try:
            # The caller before may have found out.
            if not deadline.passed():
                questions += [_Question(shard, name, keys, own) for shard, own in _well(parts)]
            for question in questions if len(questions) > 1 else ():
                question.ask_early(deadline)
            for question in questions:
                question.answer(numbers, deadline)
        finally:
            for question in questions:
                question.forget()
            self._lock.release()
        return numbers


class _Question:
    """The same command for many keys of one shard. Failures are counted, not raised."""

    def __init__(
        self, shard: Shard, name: bytes, keys: Sequence[bytes], indices: Sequence[int]
    ) -> None:
        self._shard = shard
        self._links = shard.asking
        self._name = name
        self._keys = keys
        self._indices = indices
        # The servers that have not answered yet, each with the indices of its keys.
        self._asked: Mapping[Node, Sequence[int]] = {}

    def ask_early(self, deadline: Deadline) -> None:
        """Send the command, so that shards work at the same time; `answer` retries a failure."""
        with suppress(Exception):
            self._ask(deadline)

    def answer(self, numbers: list[int], deadline: Deadline) -> None:
        """Write what the servers answer into `numbers`."""
        # A shard that hangs takes all of the time; that is not a failure of the others.
        in_time = Deadline(_GRACE_S) if deadline.passed() else deadline
        self._shard.reads.run(lambda: self._answer(numbers, in_time), self._links)

    def forget(self) -> None:
        """Close connections with unread answers, so that the next question does not get them."""
        self._links.drop(*self._asked)

    def _ask(self, deadline: Deadline) -> None:
        nodes = self._by_node(deadline)
        with Dropping(self._links, *nodes):
            for node, indices in nodes.items():
                asked = _commands(self._name, [self._keys[i] for i in indices])
                self._links.to(node, deadline).send([asked], deadline)
        self._asked = nodes

    def _answer(self, numbers: list[int], deadline: Deadline) -> None:
        if not self._asked:
            self._ask(deadline)
        nodes, self._asked = self._asked, {}
        with Dropping(self._links, *nodes):
            for node, indices in nodes.items():
                link = self._links.to(node, deadline)
                found = link.numbers(len(indices), deadline, _of_one_key)
                for index, number in zip(indices, found, strict=True):
                    numbers[index] = number

    def _by_node(self, deadline: Deadline) -> Mapping[Node, Sequence[int]]:
        route = self._links.route(deadline)
        nodes = [route(self._keys[index]) for index in self._indices]
        if len(set(nodes)) == 1:
            return {nodes[0]: self._indices}
        found: dict[Node, list[int]] = {}
        for index, node in zip(self._indices, nodes, strict=True):
            found.setdefault(node, []).append(index)
        return found


def _commands(name: bytes, keys: Sequence[bytes]) -> bytes:
    """Return `command` of each key, with the fewest steps for each: there may be thousands."""
    starts = {
        size: b"*2\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, size)
        for size in set(map(len, keys))
    }
    return b"\r\n".join([starts[len(key)] + key for key in keys] + [b""])


def _well(parts: Sequence[tuple[Shard, Sequence[int]]]) -> list[tuple[Shard, Sequence[int]]]:
    return [part for part in parts if not part[0].reads.pausing()]


def _of_one_key(error: ReplyError) -> int:
    if error.code in OF_ONE_KEY:
        return 0
    raise error


def _prefix(lengths: list[int], value_bytes: int | None) -> int:
    if value_bytes is not None and lengths.count(value_bytes) == len(lengths):
        return len(lengths)  # all are there, as nearly always
    for count, length in enumerate(lengths):
        if length < HEADER_BYTES or (value_bytes is not None and length != value_bytes):
            return count
    return len(lengths)
