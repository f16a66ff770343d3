"""How full Redis is: read from INFO, summed over shards, judged and put into words.

`status`, `check` and `doctor` all use this. Engines report the same fields on their metrics pages
(`pdkit_connector.redis_path.info`), where an alert watches them (`compose/monitoring/rules.yml`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.planning.memory import MIB, size

# KV has no expiry, so these policies evict none of it.
_KEEPS_KV = ("noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")


@dataclass(frozen=True)
class RedisMemory:
    """The memory of Redis; None is what its user may not see.

    Attributes:
        limit_bytes: its maxmemory; 0 without a limit.
        policy: its maxmemory-policy.
    """

    used_bytes: int | None = None
    limit_bytes: int | None = None
    policy: str | None = None

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> RedisMemory:
        """Read the fields of INFO, as text or as redis-py parses them.

        Raises:
            ValueError: a field is no number.
        """

        def number(name: str) -> int | None:
            return int(info[name]) if name in info else None

        policy = str(info.get("maxmemory_policy") or "") or None
        return cls(number("used_memory"), number("maxmemory"), policy)

    @property
    def share(self) -> float | None:
        """The used part of the limit; None if that is unknown, or there is no limit."""
        if not self.used_bytes or not self.limit_bytes:
            return None
        return self.used_bytes / self.limit_bytes

    @property
    def evicts_kv(self) -> bool:
        """Whether Redis makes room for new KV once it is full."""
        return (self.policy or "").startswith("allkeys")

    @property
    def keeps_kv(self) -> bool:
        """Whether Redis takes no new KV once it is full."""
        return self.policy in _KEEPS_KV

    @property
    def limit(self) -> str:
        """The limit in words."""
        return "no limit" if self.limit_bytes == 0 else _size(self.limit_bytes)

    @property
    def limit_mib(self) -> str:
        """The limit as it is set, in MiB; "" where there is none, or none is known."""
        return f"{self.limit_bytes / MIB:.0f} MiB" if self.limit_bytes else ""

    def __str__(self) -> str:
        """Return how full it is, as in "8 MiB of 1.0 GiB"."""
        return f"{_size(self.used_bytes)} of {self.limit}"


def together(readings: Sequence[RedisMemory]) -> RedisMemory:
    """Sum servers that share the keys; without a limit, if one has none."""
    limits = [one.limit_bytes for one in readings]
    return RedisMemory(
        sum_of_known([one.used_bytes for one in readings]),
        0 if 0 in limits else sum_of_known(limits),
        readings[0].policy,
    )


def sum_of_known(numbers: Sequence[int | None]) -> int | None:
    """Return the sum of numbers; None if one is unknown."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else size(size_bytes / MIB)
