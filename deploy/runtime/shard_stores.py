"""The Redis servers that share a stack's keys, used as one store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from deploy.metrics.store_stats import StoreStats, combined, sum_of_known
from deploy.runtime.store import Refusal, Store, with_twins


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
