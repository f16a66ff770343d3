"""Values on their way from Redis straight into the caller's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.attempts import OF_ONE_KEY
from pdkit_connector.redis_path.lanes import Dropping, Links
from pdkit_connector.redis_path.link import Deadline, ReplyError, Timeouts
from pdkit_connector.redis_path.reading import Reading
from pdkit_connector.redis_path.shards import Shard, Shards
from pdkit_connector.redis_path.value import BadValue, Codec, Header, PayloadChecksum

# How long a lane may take beyond the deadline to notice it.
_GRACE_S = 0.2


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
        loaded = prompt.loaded(self._timeouts.limit_s + _GRACE_S)
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
        self._shards.of(key).reads.tell_once(
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
