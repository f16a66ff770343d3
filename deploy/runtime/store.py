"""Redis as its operator sees it: reachable or not, how full, flushed or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

from deploy.metrics.store_stats import StoreStats, combined
from deploy.planning.redis_memory import RedisMemory, sum_of_known

_SCAN_COUNT = 1000
# For all keys of a server, and for those of a check. A hostile one never says that this was all.
_SCAN_S = 300.0
_MOST_MARKED = 1 << 20
_FLUSHES = ("flushall", "flushdb")

# A page of keys: cursor, pattern and count → the next cursor and keys.
Scan = Callable[[int, str, int], tuple[int, list[bytes]]]


class Refusal(NamedTuple):
    """An error that Redis gives instead of serving; `denied`: because of the log-in."""

    said: str
    denied: bool


class Store(Protocol):
    """A stack's Redis, however it is reached."""

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None if it serves, or says nothing."""

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""

    def count_marked(self, mark: str) -> int | None:
        """Return how many keys contain a mark; None if unknown."""

    def remove_marked(self, mark: str) -> int | None:
        """Remove the keys that contain a mark, and their twins, which lack only the mark.

        The mark is the beginning of a tag that goes on in digits and dashes. Returns how many were
        removed; None if Redis does not let its user do that.
        """


def with_twins(keys: Collection[bytes], mark: str) -> list[bytes]:
    """Return marked keys, and their twins (see `Store.remove_marked`)."""
    return sorted({*keys, *(_plain_twin(key, mark.encode()) for key in keys)})


def _plain_twin(key: bytes, mark: bytes) -> bytes:
    """Return a key without the tag that a mark begins; LMCache's own client appends to it."""
    before, _, after = key.partition(mark)
    return before + after.lstrip(b"-0123456789")


def key_pages(scan: Scan, pattern: str) -> Iterator[list[bytes]]:
    """Yield the keys of a server that fit a pattern; some may come twice.

    Raises:
        TimeoutError: its list of keys does not end.
    """
    cursor, until = None, time.monotonic() + _SCAN_S
    while cursor != 0:
        if time.monotonic() > until:
            raise TimeoutError(f"it did not list all its keys within {_SCAN_S:g} s")
        cursor, keys = scan(cursor or 0, pattern, _SCAN_COUNT)
        yield keys


def marked_keys(scan: Scan, mark: str) -> set[bytes]:
    """Return the keys of a server that contain a mark of letters, digits and '@%-'."""
    found = set[bytes]()
    for keys in key_pages(scan, f"*{mark}*"):
        found.update(keys)
        if len(found) > _MOST_MARKED:
            raise ConnectionError(f"more than {_MOST_MARKED} keys of one check")
    return found


def stats_from(info: Mapping[str, Any], keys: int | None) -> StoreStats:
    """Return a reading.

    Args:
        info: the fields of INFO and of INFO commandstats that are known, as text or as redis-py
            parses them.

    Raises:
        ValueError: a field is no number.
    """

    def number(name: str) -> int | None:
        return int(info[name]) if name in info else None

    errors = {
        name.removeprefix("errorstat_"): _part(value, "count")
        for name, value in info.items()
        if name.startswith("errorstat_")
    }
    counted = any(name.startswith("cmdstat_") for name in info)
    flushes = sum(_part(info.get(f"cmdstat_{name}", ""), "calls") for name in _FLUSHES)
    memory = RedisMemory.read(info)
    return StoreStats(
        keys=keys,
        used_memory_bytes=memory.used_bytes,
        max_memory_bytes=memory.limit_bytes,
        evicted_keys=number("evicted_keys"),
        flushes=flushes if counted else None,
        run_id=str(info["run_id"]) if "run_id" in info else None,
        commands=number("total_commands_processed"),
        received_bytes=number("total_net_input_bytes"),
        sent_bytes=number("total_net_output_bytes"),
        clients=number("connected_clients"),
        errors=errors,
        policy=memory.policy,
        replica=str(info.get("role", "")) == "slave",
        version=str(info["redis_version"]) if "redis_version" in info else None,
    )


def _part(value: Any, name: str) -> int:
    """Return one number of a field such as 'calls=3,usec=9'; 0 without it."""
    if isinstance(value, Mapping):
        return int(value.get(name, 0))
    return int(str(value).partition(f"{name}=")[2].partition(",")[0] or 0)


def info_fields(text: str) -> dict[str, str]:
    """Return the fields of what INFO answers."""
    lines = (line.strip().partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in lines if colon}


class ShardStore(Protocol):
    """One of the servers. A key's twin (see `Store.remove_marked`) may be on another one."""

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None if it serves, or says nothing."""

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""

    def marked_keys(self, mark: str) -> set[bytes] | None:
        """Return the keys that contain a mark; None if unknown."""

    def unlink(self, keys: Sequence[bytes]) -> int | None:
        """Remove what there is of the keys; None if Redis does not do that."""


class ShardStores:
    """All servers of a stack. The store is down if one of them is; a stack may have no server."""

    def __init__(self, shards: Sequence[ShardStore]) -> None:
        self._shards = shards

    def refusal(self) -> Refusal | None:
        """Return what one says instead of serving; None if all serve, or say nothing."""
        return next(filter(None, (shard.refusal() for shard in self._shards)), None)

    def stats(self) -> StoreStats | None:
        """Return the sums, or None if one does not answer or there is none."""
        found = [shard.stats() for shard in self._shards]
        known = [stats for stats in found if stats is not None]
        return combined(known) if known and len(known) == len(found) else None

    def count_marked(self, mark: str) -> int | None:
        found = [shard.marked_keys(mark) for shard in self._shards]
        return sum_of_known([None if keys is None else len(keys) for keys in found])

    def remove_marked(self, mark: str) -> int | None:
        """Remove marked keys and their twins wherever they lie; None if one does not answer."""
        found = [shard.marked_keys(mark) for shard in self._shards]
        keys = with_twins({key for keys in found for key in keys or ()}, mark)
        removed = [shard.unlink(keys) for shard in self._shards]
        return None if None in found else sum_of_known(removed)


@contextmanager
def open_shards(shards: Sequence[AbstractContextManager[ShardStore]]) -> Iterator[Store]:
    """Open a stack's Redis, as many as it has, and close them again."""
    with ExitStack() as opened:
        yield ShardStores([opened.enter_context(shard) for shard in shards])
