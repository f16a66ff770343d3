"""Look up, load and store values in Redis, one or several, within limits.

Failures of Redis never raise: what does not come in time is a miss, what cannot be stored is left
out. Both are counted, and logged once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from pdkit_connector.counters import Counters, key_of
from pdkit_connector.errors import ConnectorError
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.pool import OF_ONE_KEY, Dropping, Links, Shard, Shards
from pdkit_connector.redis_path.protocol import (
    Deadline,
    LinkBroken,
    Reading,
    ReplyError,
    Timeouts,
    command,
)
from pdkit_connector.redis_path.settings import Limits
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Codec, Header, PayloadChecksum
from pdkit_connector.redis_url import Node
from pdkit_connector.registry import describe


class Client:
    """`lookups`, `loads` and `stores`; connections are made by `open`, or when first needed.

    Raises ConnectorError where a URL is no address (see `address`).
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        codec: Codec,
        counters: Counters,
        limits: Limits | None = None,
    ) -> None:
        """Take the URL of one Redis, or of several that share the keys."""
        self._limits = limits = limits or Limits()
        self.shards = shards = Shards([urls] if isinstance(urls, str) else urls, counters, limits)
        self.lookups = Lookups(shards, counters, limits.lookup_s)
        load, store = (Timeouts(s, limits.silent_s) for s in (limits.load_s, limits.store_s))
        self.loads = Loads(shards, codec, counters, load)
        self.stores = Stores(shards, codec, counters, store)

    def troubles(self) -> Iterator[Exception]:
        """Ping each Redis; yield the failures."""
        for shard in self.shards:
            try:
                self.lookups.ping(shard)
            except Exception as exc:  # noqa: BLE001 - redis-py's own kinds, OSError, a lying server
                yield exc

    def open(self) -> None:
        """Begin to open the connections for values; to be called before the first load or store.

        It does not wait, and what fails is tried again when needed. Where names are found slowly,
        as after a restart, they are known by the time there is something to store.
        """
        self.shards.open()

    def close(self) -> None:
        """Finish the stores that began, within their limit, and close the connections."""
        self.shards.close(self._limits.store_s, self._limits.load_s)
        self.lookups.close()


def refuse_bad_login(client: Client) -> None:
    """Refuse a wrong password now, since every call would fail; Redis may start later.

    Raises:
        ConnectorError: Redis refuses this user or password.
    """
    for trouble in client.troubles():
        if _is_refusal(trouble):
            raise ConnectorError(f"Redis refuses this engine: {describe(trouble)}") from None
        get_logger().warning("pdkit-connector WARNING Redis does not answer: %s", describe(trouble))


def _is_refusal(error: Exception) -> bool:
    """Tell whether Redis refuses this user or password."""
    if isinstance(error, ReplyError):
        return error.code in ("NOAUTH", "WRONGPASS", "NOPERM")
    return type(error).__name__ in ("AuthenticationError", "NoPermissionError")


# How long a lane may take beyond the deadline to notice it.
_LANE_GRACE_S = 0.2


class Target(Protocol):
    """Memory that a value is loaded into."""

    def memory(self) -> memoryview:
        """Return the bytes to write to, as many as the payload has."""
        ...

    def release(self) -> None:
        """Free the memory: it is not needed."""
        ...


class _MayBeTorn(Exception):
    """The ranges of a value do not fit together: it is damaged, or was replaced meanwhile."""


T = TypeVar("T", bound=Target)
# Returns memory for a payload, or None if there is none in time. Raises BadValue if the reader
# cannot use the payload. Called from the lanes' threads.
Allocate = Callable[[Header, Deadline], T | None]


class Loads:
    """Loads prompts over several connections."""

    def __init__(
        self, shards: Shards, codec: Codec, counters: Counters, timeouts: Timeouts
    ) -> None:
        self._shards = shards
        self._codec = codec
        self._counters = counters
        self._timeouts = timeouts

    def load(self, keys: Sequence[bytes], allocate: Allocate[T]) -> list[T]:
        """Return the values of the keys, up to the first that does not come in time."""
        if not keys:
            return []
        self._counters.add("calls", operation="load")
        began = time.perf_counter()
        prompt = _Prompt(keys, allocate, self._timeouts.begin())
        # Paused shards come first: their keys end the prompt, so that later ones are not asked for.
        parts = sorted(self._shards.split(keys), key=lambda part: not part[0].reads.pausing())
        for shard, indices in parts:
            self._begin(prompt, shard, indices)
        loaded = prompt.loaded(self._timeouts.limit_s + _LANE_GRACE_S)
        self._counters.add("seconds", time.perf_counter() - began, operation="load")
        size = sum(len(target.memory()) for target in loaded)
        self._counters.add("bytes", size, operation="load")
        self._count("loaded", len(loaded))
        return loaded

    def _begin(self, prompt: _Prompt[T], shard: Shard, indices: Sequence[int]) -> None:
        """Let a shard's lanes load its keys."""
        if shard.reads.pausing():
            prompt.give_up(indices)
            self._count("paused", len(indices))
            return
        count = min(shard.load_lanes.count, len(indices))
        for lane in range(count):
            # Each lane gets early chunks, since those count most.
            share = indices[lane::count]
            if not shard.load_lanes.submit(partial(self._load, prompt, shard, share)):
                prompt.give_up(share)

    def _load(self, prompt: _Prompt[T], shard: Shard, share: Sequence[int], links: Links) -> None:
        """Load a lane's share of a prompt; the first key that fails ends the prompt there."""
        left = list(share)
        try:
            # A job that waited too long for its turn is not a failure of Redis.
            if not prompt.deadline.passed():
                shard.reads.run(lambda: self._read(links, prompt, left), links)
        finally:
            prompt.give_up(left)
            self._count("unread", len(left))

    def _read(self, links: Links, prompt: _Prompt[T], left: list[int]) -> None:
        """Read values in order, whatever server they are on, and take each off `left`."""
        route = links.route(prompt.deadline)
        places = [(i, route(prompt.keys[i])) for i in left]
        coming: dict[int, Reading] = {}

        def ask(place: int) -> None:
            if place < len(places) and places[place][0] not in coming:
                i, node = places[place]
                link = links.to(node, prompt.deadline)
                coming[i] = Reading(link, prompt.keys[i], prompt.deadline)

        def ask_again(place: int) -> None:
            """Ask for all of a value at once, on a connection on which nothing is outstanding."""
            i, node = places[place]
            asked = [j for j, at in places if at == node and j in coming]
            if any(coming[j].unread for j in asked):
                links.drop(node)
                for j in asked:
                    del coming[j]
            link = links.to(node, prompt.deadline)
            coming[i] = Reading(link, prompt.keys[i], prompt.deadline, in_one_command=True)

        with Dropping(links, *{node for _, node in places}):
            for place, (i, node) in enumerate(places):
                if prompt.hole < i:
                    break
                if i not in coming:
                    ask(place)
                # The next value is asked for while the end of this one is in transit.
                ask_next = partial(ask, place + 1)
                try:
                    target = self._value(coming[i], prompt, prompt.keys[i], ask_next)
                except _MayBeTorn:
                    ask_again(place)
                    target = self._value(coming[i], prompt, prompt.keys[i], ask_next)
                    if target is not None:
                        self._counters.add("replaced")
                if coming.pop(i).unread:
                    links.drop(node)
                left.remove(i)
                prompt.deliver(i, target)
            links.drop(*(node for i, node in places if i in coming))

    def _value(
        self, reading: Reading, prompt: _Prompt[T], key: bytes, all_asked: Callable[[], None]
    ) -> T | None:
        """Read a whole value; None if it is missing or unusable.

        Raises _MayBeTorn if it is, as far as its ranges show.
        """
        try:
            raw = reading.header()
            if raw is None:
                self._count("missing")
                return None
            header, check = self._codec.parse(raw, key)
            target = prompt.allocate(header, prompt.deadline)
            if target is None:
                self._count("no_memory")
            else:
                _receive(reading, target, header, check, all_asked)
            return target
        except ReplyError as error:
            if error.code not in OF_ONE_KEY:
                raise
            if reading.may_be_torn:
                raise _MayBeTorn from error
            self._useless("foreign", error, key)
        except BadValue as bad:
            if reading.may_be_torn:
                raise _MayBeTorn from bad
            self._useless(bad.kind, bad, key)
        return None

    def _useless(self, kind: str, why: Exception, key: bytes) -> None:
        self._count(kind)
        self._shards.of(key).reads.warn_once(
            f"{kind} value",
            f"a value is not used, because {why} (key {key.decode(errors='replace')}); "
            "its chunk is computed again, and so is that of any other like it",
        )

    def _count(self, result: str, chunks: int = 1) -> None:
        self._counters.add("chunks", chunks, operation="load", result=result)


def _receive(
    reading: Reading,
    target: Target,
    header: Header,
    check: PayloadChecksum,
    all_asked: Callable[[], None],
) -> None:
    """Fill a target, or release it and raise: BadValue if the bytes have changed."""
    try:
        memory = target.memory()
        if len(memory) != header.payload_bytes:
            raise BadValue(
                "foreign", f"{len(memory)} bytes are wanted, {header.payload_bytes} come"
            )
        reading.payload(memory, check, all_asked)
    except BaseException:
        target.release()
        raise


class _Prompt(Generic[T]):
    """One load: its keys, and the values that lanes deliver in any order."""

    def __init__(self, keys: Sequence[bytes], allocate: Allocate[T], deadline: Deadline) -> None:
        self.keys = keys
        self.allocate = allocate
        self.deadline = deadline
        # The first index without a value, as far as known.
        self.hole = len(keys)
        self._targets: list[T | None] = [None] * len(keys)
        self._awaited = len(keys)
        self._closed = False
        self._condition = threading.Condition()

    def give_up(self, indices: Sequence[int]) -> None:
        """Learn that there are no such values."""
        for index in indices:
            self.deliver(index, None)

    def deliver(self, index: int, target: T | None) -> None:
        """Take a value, or learn that there is none."""
        with self._condition:
            if target is None:
                self.hole = min(self.hole, index)
            elif not self._closed:
                self._targets[index] = target
                target = None
            self._awaited -= 1
            if not self._awaited:
                self._condition.notify_all()
        if target is not None:
            target.release()  # too late

    def loaded(self, limit_s: float) -> list[T]:
        """Wait for all values, and return those before the first that is missing."""
        with self._condition:
            self._condition.wait_for(lambda: not self._awaited, limit_s)
            self._closed = True
        found: list[T] = []
        for index, target in enumerate(self._targets):
            if target is None:
                continue
            if index == len(found):
                found.append(target)
            else:
                target.release()
        return found


# Time to read an answer that came while another shard used up all of the time.
_ANSWER_GRACE_S = 0.05
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
        """Count the keys that have a value, up to the first that has none.

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
        in_time = Deadline(_ANSWER_GRACE_S) if deadline.passed() else deadline
        self._shard.reads.run(lambda: self._answer(numbers, in_time), self._links)

    def forget(self) -> None:
        """Close connections with unread answers, so that the next question does not get them."""
        self._links.drop(*self._asked)

    def _ask(self, deadline: Deadline) -> None:
        nodes = self._by_node(deadline)
        with Dropping(self._links, *nodes):
            for node, indices in nodes.items():
                asked = _command_of_each(self._name, [self._keys[i] for i in indices])
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


def _command_of_each(name: bytes, keys: Sequence[bytes]) -> bytes:
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


class Stores:
    """Stores values over several connections, in the background."""

    def __init__(
        self,
        shards: Shards,
        codec: Codec,
        counters: Counters,
        timeouts: Timeouts,
    ) -> None:
        self._shards = shards
        self._codec = codec
        self._counters = counters
        self._timeouts = timeouts

    def store(
        self, key: bytes, header: Header, payload: memoryview, done: Callable[[bool], None]
    ) -> bool:
        """Begin to store a value; return False, without calling `done`, if it is left out.

        `payload` must not change until `done` is called, with whether Redis has the value.
        """
        shard = self._shards.of(key)
        if shard.writes.pausing():
            self._count("paused")
            return False
        deadline = self._timeouts.begin()

        def job(links: Links) -> None:
            stored = False
            try:
                stored = self._store(shard, links, key, header, payload, deadline)
            finally:
                done(stored)

        return shard.store_lanes.submit(job)

    def _store(
        self,
        shard: Shard,
        links: Links,
        key: bytes,
        header: Header,
        payload: memoryview,
        deadline: Deadline,
    ) -> bool:
        if shard.writes.pausing() or deadline.passed():
            self._count("paused" if shard.writes.pausing() else "late")
            return False
        began = time.perf_counter()
        try:
            raw = self._codec.header(header, payload)
        except BadValue as bad:
            self._count(bad.kind)
            shard.writes.warn_once("unfit", f"a chunk is not stored, because {bad}")
            return False
        stored = bool(shard.writes.run(partial(_set, links, key, raw, payload, deadline), links))
        self._counters.add("seconds", time.perf_counter() - began, operation="store")
        if stored:
            self._counters.add("bytes", len(payload), operation="store")
        self._count("stored" if stored else "failed")
        return stored

    def _count(self, result: str) -> None:
        self._counters.add("chunks", operation="store", result=result)


def _set(links: Links, key: bytes, header: bytes, payload: memoryview, deadline: Deadline) -> bool:
    size = len(header) + len(payload)
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
    node = links.route(deadline)(key)
    with Dropping(links, node):
        link = links.to(node, deadline)
        link.send([head + header, payload, b"\r\n"], deadline)
        if (reply := link.status(deadline)) != b"OK":
            raise LinkBroken(f"{reply[:20]!r} in answer to SET")
    return True
