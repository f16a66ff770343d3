"""Storing values in Redis, straight from the caller's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.lanes import Dropping, Links
from pdkit_connector.redis_path.link import Deadline, LinkBroken, Timeouts
from pdkit_connector.redis_path.shards import Shard, Shards
from pdkit_connector.redis_path.value import BadValue, Codec, Header


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
            shard.writes.tell_once("unfit", f"a chunk is not stored, because {bad}")
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
        if (said := link.status(deadline)) != b"OK":
            raise LinkBroken(f"{said[:20]!r} in answer to SET")
    return True
