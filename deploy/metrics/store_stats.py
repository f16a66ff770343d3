"""What Redis reports about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deploy.planning.redis_memory import RedisMemory, sum_of_known, together


@dataclass(frozen=True)
class StoreStats:
    """A reading of Redis; None is what its user may not see.

    Attributes:
        keys: keys of all clients in its database.
        max_memory_bytes: 0 if there is no limit.
        flushes: FLUSHALL and FLUSHDB commands since its start.
        run_id: changes when Redis restarts.
        commands, received_bytes, sent_bytes: of all clients since its start, this reading included.
        clients: connected clients.
        errors: error code → number of such answers since its start, to all clients.
        policy: what it does when it is full.
        replica: it follows another server.
    """

    keys: int | None
    used_memory_bytes: int | None
    max_memory_bytes: int | None
    evicted_keys: int | None
    flushes: int | None
    run_id: str | None
    commands: int | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None
    clients: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    policy: str | None = None
    replica: bool = False
    version: str | None = None

    @property
    def memory(self) -> RedisMemory:
        """How full it is."""
        return RedisMemory(self.used_memory_bytes, self.max_memory_bytes, self.policy)

    def restarted_since(self, earlier: StoreStats) -> bool:
        """Tell whether this is another life of the server, or another server."""
        known = None not in (self.run_id, earlier.run_id)
        return known and self.run_id != earlier.run_id

    def grown(self, name: str, earlier: StoreStats) -> int | None:
        """Return by how much one of the counts grew; None if that is not known."""
        before, after = getattr(earlier, name), getattr(self, name)
        if before is None or after is None or self.restarted_since(earlier) or after < before:
            return None
        return int(after - before)


def combined(readings: Sequence[StoreStats]) -> StoreStats:
    """Return the sums over servers that share the keys; without a limit, if one has none."""
    if len(readings) == 1:
        return readings[0]
    memory = together([one.memory for one in readings])
    ids = [one.run_id for one in readings]
    return replace(
        readings[0],
        keys=sum_of_known([one.keys for one in readings]),
        used_memory_bytes=memory.used_bytes,
        max_memory_bytes=memory.limit_bytes,
        evicted_keys=sum_of_known([one.evicted_keys for one in readings]),
        flushes=sum_of_known([one.flushes for one in readings]),
        run_id=None if None in ids else " ".join(sorted(map(str, ids))),
        commands=sum_of_known([one.commands for one in readings]),
        received_bytes=sum_of_known([one.received_bytes for one in readings]),
        sent_bytes=sum_of_known([one.sent_bytes for one in readings]),
        clients=sum_of_known([one.clients for one in readings]),
        errors=dict(sum((Counter(one.errors) for one in readings), Counter())),
        replica=any(one.replica for one in readings),
    )
