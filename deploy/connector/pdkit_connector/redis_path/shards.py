"""Several Redis that share the keys, each with its own connections, threads and health.

A failure of one does not delay keys on another. Most stacks have one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.address import parse
from pdkit_connector.redis_path.attempts import Attempts
from pdkit_connector.redis_path.lanes import Lanes, Links
from pdkit_connector.redis_path.routing_table import routing_table


class LaneCounts(Protocol):
    """Number of connections for values in each direction, all shards together."""

    @property
    def load_lanes(self) -> int:
        """Connections that values are loaded on."""

    @property
    def store_lanes(self) -> int:
        """Connections that values are stored on."""


@dataclass(frozen=True)
class Shard:
    """One Redis: a server, a Sentinel's master or a cluster.

    Attributes:
        reads, writes: health of reading and writing.
        asking: connections for lookups; callers take turns.
        watching: connections for questions about the server itself.
    """

    reads: Attempts
    writes: Attempts
    load_lanes: Lanes
    store_lanes: Lanes
    asking: Links
    watching: Links


class Shards:
    """The shards of a client, in the same order in every client of the stack."""

    def __init__(self, urls: Sequence[str], counters: Counters, lanes: LaneCounts) -> None:
        """Connect to nothing yet; raise ConnectorError where a URL is no address."""
        self._all = tuple(
            _shard(url, counters, lanes, number if len(urls) > 1 else None, len(urls))
            for number, url in enumerate(urls)
        )

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._all)

    def of(self, key: bytes) -> Shard:
        """Return the shard of a key: the same in every engine."""
        return self._all[self._number(key)]

    def split(self, keys: Sequence[bytes]) -> list[tuple[Shard, Sequence[int]]]:
        """Return the shards that have some of the keys, each with the indices of its own."""
        if len(self._all) == 1:
            return [(self._all[0], range(len(keys)))]
        indices: list[list[int]] = [[] for _ in self._all]
        for index, key in enumerate(keys):
            indices[self._number(key)].append(index)
        return [(shard, own) for shard, own in zip(self._all, indices, strict=True) if own]

    def _number(self, key: bytes) -> int:
        return zlib.crc32(key) % len(self._all)

    def open(self) -> None:
        """Begin to open the connections for values; to be called before the first job."""
        for shard in self:
            shard.load_lanes.open()
            shard.store_lanes.open()

    def close(self, store_s: float, load_s: float) -> None:
        """Finish the stores that began and close all connections, within these limits in all."""
        _close([shard.store_lanes for shard in self], store_s)
        _close([shard.load_lanes for shard in self], load_s)


def _shard(
    url: str, counters: Counters, lanes: LaneCounts, number: int | None, count: int
) -> Shard:
    where = routing_table(parse(url))
    name, labels = ("", {}) if number is None else (f" shard {number}", {"shard": str(number)})

    def links() -> Links:
        return Links(where, counters)

    def share(total: int) -> int:
        return max(1, total // count)

    return Shard(
        Attempts(f"reading{name}", counters, labels),
        Attempts(f"storing{name}", counters, labels),
        Lanes("load", share(lanes.load_lanes), links, counters, where=name),
        Lanes("store", share(lanes.store_lanes), links, counters, where=name),
        links(),
        links(),
    )


def _close(lanes: Sequence[Lanes], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    for one in lanes:
        one.close(max(0.0, ends - time.monotonic()))
