"""The kit's own Redis: how many there are, where they listen and what memory each has."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.config.spec import StackSpec
from deploy.planning.inventory import Inventory

# A shard keeps a processor busy, and the system's part of moving its bytes another; the engines
# and the rest of the machine need most.
_CPUS_A_SHARD = 16
_MOST_SHARDS = 8


@dataclass(frozen=True)
class RedisPlan:
    """One Redis of the stack; several share the keys.

    Attributes:
        port: where this machine reaches it; 0 where it does so in another way.
        memory_mib: its maxmemory.
    """

    name: str
    port: int
    memory_mib: int


def shard_count(spec: StackSpec, inventory: Inventory, *, gpus: int) -> int:
    """Return how many Redis share the keys: as asked, else one a GPU of the stack, as far as the
    machine has processors for them. LMCache's own client knows one.
    """
    if spec.redis.shards is not None:
        return spec.redis.shards
    if spec.redis.client == "lmcache" or spec.redis.url_file:
        return 1
    return max(1, min(gpus, inventory.cpus // _CPUS_A_SHARD, _MOST_SHARDS))


def redis_shards(port: int, count: int, memory_mib: int) -> tuple[RedisPlan, ...]:
    """Return the Redis that share the memory; with a port there is one."""
    if count == 1:
        return (RedisPlan("redis", port, memory_mib),)
    own_mib = max(1, memory_mib // count)
    return tuple(RedisPlan(f"redis-{number}", 0, own_mib) for number in range(count))
