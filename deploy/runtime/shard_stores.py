"""Several Redis servers that share a stack's keys, used as one store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from deploy.metrics.store_stats import StoreStats, combined
from deploy.runtime.store import Refusal, Store, plain_twin


class ShardStore(Store, Protocol):
    """One of the servers. A key's twin (see `Store.remove_marked`) may be on another one."""

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""

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
        return _sum([shard.count_marked(mark) for shard in self._shards])

    def remove_marked(self, mark: str) -> int | None:
        """Remove marked keys and their twins wherever they lie; None if one does not answer."""
        found = [shard.marked_keys(mark) for shard in self._shards]
        marked = {key for keys in found for key in keys or ()}
        twins = {plain_twin(key, mark.encode()) for key in marked}
        removed = [shard.unlink(sorted(marked | twins)) for shard in self._shards]
        return None if None in found else _sum(removed)


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


@contextmanager
def open_shards(shards: Sequence[AbstractContextManager[ShardStore]]) -> Iterator[Store]:
    """Open a stack's Redis, as many as it has, and close them again."""
    with ExitStack() as opened:
        stores = [opened.enter_context(shard) for shard in shards]
        yield stores[0] if len(stores) == 1 else ShardStores(stores)
