"""Chunks to store and load in tests, and memory that knows where each piece of it went."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from pdkit_connector.counters import Counters
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.protocol import Deadline
from pdkit_connector.redis_path.settings import Limits
from pdkit_connector.redis_path.transfer import Client
from pdkit_connector.redis_path.value import HEADER_BYTES, Codec, Header, digest

LAYOUT = "a layout"
CODEC = Codec(LAYOUT)
# For a Redis that is well: nothing waits that long but on a machine that hardly gets on.
LIMITS = Limits(lookup_s=20, load_s=30, store_s=30)


def client(url: str, limits: Limits = LIMITS, codec: Codec = CODEC) -> Client:
    """Return a client with counters of its own, as `client.counters`."""
    counters = Counters()
    made = Client(url, codec, counters, limits)
    made.counters = counters
    return made


def payload(seed: object, size: int = 4096) -> bytes:
    return random.Random(str(seed)).randbytes(size)


def prompt(name: str, count: int, size: int = 4096) -> dict[bytes, bytes]:
    """Return the chunks of a prompt: payloads by key."""
    return {f"{name}:{i}".encode(): payload(f"{name}:{i}", size) for i in range(count)}


def header(key: bytes, data: bytes, codec: Codec = CODEC) -> Header:
    return Header("uint8", (1, len(data)), 2, len(data), codec.layout, digest(key))


def another_batch(raw: bytes, name: bytes, codec: Codec) -> bytes:
    """Return what another producer stores under a value's key: the same chunk, other bytes."""
    of, _ = codec.parse(raw[:HEADER_BYTES], name)
    data = payload("another batch", of.payload_bytes)
    return codec.header(of, data) + data


class Warnings(list):
    """What the connector warns of, while it is open."""

    def __enter__(self) -> Warnings:
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.append(record.getMessage())
        get_logger().addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        get_logger().removeHandler(self._handler)


class Storing:
    """Stores that were begun, and what became of them."""

    def __init__(
        self, to: Client, chunks: dict[bytes, bytes], then: Callable[[], object] = bool
    ) -> None:
        """Call `then` as each store ends, before the next one of its lane begins."""
        self._then = then
        self._condition = threading.Condition()
        self.ended: dict[bytes, list[bool]] = {key: [] for key in chunks}
        self.begun = {
            key: to.stores.store(key, header(key, data), memoryview(data), self._end(key))
            for key, data in chunks.items()
        }

    def _end(self, key: bytes) -> Callable[[bool], None]:
        def done(stored: bool) -> None:
            self._then()
            with self._condition:
                self.ended[key].append(stored)
                self._condition.notify_all()

        return done

    def wait(self, limit_s: float = 60.0) -> list[bytes]:
        """Wait until each payload is given back, once; return the keys that Redis has."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._left() == 0, limit_s), self.ended
        for key, begun in self.begun.items():
            assert len(self.ended[key]) == int(begun), key
        return [key for key, ended in self.ended.items() if ended == [True]]

    def _left(self) -> int:
        return sum(self.begun.values()) - sum(map(len, self.ended.values()))


def stored(to: Client, chunks: dict[bytes, bytes]) -> list[bytes]:
    """Store chunks; return the keys that Redis has then."""
    return Storing(to, chunks).wait()


class Memory:
    """A target that notes when it is released."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.released = 0

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def release(self) -> None:
        self.released += 1


class Pool:
    """Hands out memory, and tells whether all of it came back."""

    def __init__(self, then: Callable[[int], object] = bool) -> None:
        """Call `then` with how many pieces were handed out, after each."""
        self._lock = threading.Lock()
        self._then = then
        self.handed: list[Memory] = []

    def allocate(self, header: Header, _deadline: Deadline) -> Memory | None:
        memory = Memory(header.payload_bytes)
        with self._lock:
            self.handed.append(memory)
            count = len(self.handed)
        self._then(count)
        return memory

    def balanced(self, kept: Sequence[Memory]) -> bool:
        """Tell whether all but what was kept was released, each once."""
        ids = {id(memory) for memory in kept}
        return all(memory.released == int(id(memory) not in ids) for memory in self.handed)


def loaded(from_: Client, keys: Sequence[bytes], pool: Pool | None = None) -> list[bytes]:
    """Load a prompt and return its payloads; fail where memory is lost or given back twice."""
    pool = pool or Pool()
    found = from_.loads.load(keys, pool.allocate)
    assert pool.balanced(found)
    return [bytes(memory.data) for memory in found]
