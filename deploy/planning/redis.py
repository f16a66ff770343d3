"""The kit's own Redis servers (shards): how many, their ports and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.config.spec import SettledSpec
from deploy.errors import ConfigError, NamedSetting
from deploy.planning.inventory import Inventory
from deploy.planning.topology import Topology

# While KV moves, a shard keeps one processor busy. On 16 processors four shards moved up to three
# times as much KV as one, for a tenth to a fifth more processor time: docs/results/redis-shards.md
_CPUS_A_SHARD = 4
_ENOUGH_SHARDS = 4
_MOST_SHARDS = 8


@dataclass(frozen=True)
class RedisPlan:
    """One Redis of the stack; several share the keys.

    Attributes:
        port: on this machine; 0 if it is reached in another way.
        memory_mib: its maxmemory.
    """

    name: str
    port: int
    memory_mib: int


def shard_count(spec: SettledSpec, inventory: Inventory, *, gpus: int) -> int:
    """Return the number of shards: as set, else one for every few processors, up to a limit.

    LMCache's own client supports one, and on CPUs engines need the processors.
    """
    if spec.redis.shards is not None:
        return spec.redis.shards
    if spec.redis.client == "lmcache" or spec.redis.url_file or not gpus:
        return 1
    limit = min(max(_ENOUGH_SHARDS, gpus), _MOST_SHARDS)
    return max(1, min(inventory.cpus // _CPUS_A_SHARD, limit))


def redis_shards(port: int, count: int, memory_mib: int) -> tuple[RedisPlan, ...]:
    """Return the shards, which divide the memory equally; with a port there is one."""
    if count == 1:
        return (RedisPlan("redis", port, memory_mib),)
    own_mib = max(1, memory_mib // count)
    return tuple(RedisPlan(f"redis-{number}", 0, own_mib) for number in range(count))


def check_redis(spec: SettledSpec, topology: Topology) -> None:
    """Refuse settings of Redis that contradict each other, or a topology without Redis.

    Raises:
        ConfigError: naming them.
    """
    if not topology.redis:
        _check_nothing_shared(spec, topology)
    file = spec.redis.url_file
    if spec.redis.client == "lmcache":
        _check_lmcache_client(spec)
    if file is None:
        if spec.redis.tls_files:
            raise ConfigError(
                "only for your own Redis, but redis.url_file is not set",
                setting="redis.tls_files",
                hint="leave redis.tls_files out, or name the file with the Redis URL in "
                "redis.url_file",
            )
        return
    for name in ("memory_gib", "server", "image", "shards"):
        value = getattr(spec.redis, name)
        if value is not None:
            raise ConfigError(
                f"{value} is for the Redis that the kit starts, and redis.url_file ({file}) names "
                "your own",
                setting=f"redis.{name}",
                hint=f"leave redis.{name} out of deploy.yaml, or redis.url_file",
            )


def _check_lmcache_client(spec: SettledSpec) -> None:
    """Refuse what does not go with LMCache's own client, which is supported with one plain Redis.

    `deploy/workflows/user_redis.py` checks the scheme of a user's own URL, where it reads it.
    """
    redis = spec.redis
    asked = (
        ("layerwise", "true" if spec.layerwise else "", "moves whole chunks"),
        ("redis.shards", redis.shards if redis.shards != 1 else None, "uses one server"),
        ("redis.integrity", "mac" if redis.integrity == "mac" else "", "checks nothing"),
        ("redis.tls_files", [*map(str, redis.tls_files)], "is supported without TLS"),
    )
    for field, value, why in asked:
        if value:
            raise ConfigError(
                f"{value} does not work with redis.client lmcache, which {why}",
                setting=field,
                hint=f"leave {field} out, or leave redis.client out of deploy.yaml: the default "
                "client supports it",
            )


def _check_nothing_shared(spec: SettledSpec, topology: Topology) -> None:
    """Refuse settings for sharing KV in a topology whose engines share none."""
    asked = {
        "layerwise": spec.layerwise,
        "save_decode_cache": spec.save_decode_cache,
        "redis.url_file": spec.redis.url_file is not None,
    }
    for field in (field for field, given in asked.items() if given):
        raise ConfigError(
            (NamedSetting("topology"), f" {topology} has no Redis, and its engines share no KV"),
            setting=field,
            hint=f"leave {field} out, or --topology {topology.engines}a+redis"
            if topology.engines > 1
            else f"leave {field} out, or --topology 1p1d",
        )
