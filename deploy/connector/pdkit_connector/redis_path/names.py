"""The names of LMCache's keys in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from lmcache.utils import CacheEngineKey

# The parts of LMCache's text of a key, beside its hash.
_ALIKE = attrgetter("__class__", "model_name", "world_size", "worker_id", "dtype", "tags")
_KNOWN = {
    "model_name", "world_size", "worker_id", "chunk_hash", "dtype",
    "request_configs", "tags", "_dtype_str",
}  # fmt: skip
# Keys of another release may have more parts.
_KNOWS_ALL = set(getattr(CacheEngineKey, "__dataclass_fields__", ())) == _KNOWN


class Names:
    """Turns keys into names with a prefix."""

    def __init__(self, prefix: str, *, first_rank_only: bool) -> None:
        """With `first_rank_only`, give the keys of all ranks the names of the first rank's."""
        self._prefix = prefix
        self._first_rank_only = first_rank_only

    def one(self, key: Any) -> bytes:
        """Return the name of a key."""
        if self._first_rank_only:
            key = key.with_new_worker_id(0)
        return f"{self._prefix}{key.to_string()}".encode()

    def many(self, keys: Sequence[Any]) -> list[bytes]:
        """Return the names of keys.

        The keys of a prompt differ in their hashes only, so LMCache turns just one of them into
        text: for all, that would take three times as long as the rest of a lookup.
        """
        return self._alike(keys) or [self.one(key) for key in keys]

    def _alike(self, keys: Sequence[Any]) -> list[bytes]:
        """Return the names of keys that differ in their hashes only; nothing if more differs."""
        if not _KNOWS_ALL or not keys:
            return []
        first = keys[0]
        try:
            facts = list(map(_ALIKE, keys))
            if type(first) is not CacheEngineKey or facts.count(facts[0]) < len(facts):
                return []
            spelled, mark = self.one(first), b"@%x@" % first.chunk_hash
            if spelled.count(mark) != 1:
                return []
            # From the right: the rank before the hash may be the same number.
            head, _, tail = spelled.rpartition(mark)
            names = [b"%b@%x@%b" % (head, key.chunk_hash, tail) for key in keys]
        except TypeError:  # a tag that has no hash, or hashes that are bytes
            return []
        return names if names[-1] == self.one(keys[-1]) else []
