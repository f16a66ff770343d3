"""Damages a prompt's chunks in Redis between their store and their load."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from bench.check_power.damage import Damage, Stored
from bench.check_power.layout import Layout
from bench.store_gate import NOTHING, at_each_store, let_through

# LMCache's own client keeps a chunk as two keys, of which the other has its shape.
_PAYLOAD = b"kv_bytes"
_READS = ("get", "mget", "getrange")


@dataclass(frozen=True)
class Loot:
    """What a vandal left behind.

    Attributes:
        first_chunk: as it was; another prompt's chunk for the next.
        in_time: nothing had been read before.
    """

    first_chunk: bytes
    in_time: bool


def payloads(store: redis.Redis, part: str) -> list[bytes]:
    """Return the keys of chunks whose keys contain a part."""
    found = set(store.scan_iter(match=f"*{part}*", count=1000))
    return sorted(key for key in found if key.endswith(_PAYLOAD))


@contextlib.contextmanager
def vandal(
    store: redis.Redis, part: str, chunks: int, work: tuple[Damage, bytes, Layout, random.Random]
) -> Iterator[list[Loot]]:
    """Damage a prompt's chunks, once, when all are stored and before anybody can know of it.

    LMCache writes a chunk's shape when it has written its bytes: while that is held back, all of
    the bytes are there to be damaged, and nobody reads them.

    Args:
        part: what the keys of the prompt contain, and no other's.
        work: the damage, another prompt's chunk, the layout of chunks, and the source of chance.
    """
    loot: list[Loot] = []
    reads: list[int] = []

    def look() -> None:
        if not reads:  # whatever was read before, it was no chunk of this prompt
            reads.append(_reads(store))
        if not loot and len(keys := payloads(store, part)) == chunks:
            loot.append(_spoil(store, keys, reads[0], work))
        else:
            let_through(store, NOTHING)

    with at_each_store(store, look):
        yield loot


def _spoil(
    store: redis.Redis,
    keys: list[bytes],
    reads: int,
    work: tuple[Damage, bytes, Layout, random.Random],
) -> Loot:
    damage, foreign, layout, rng = work
    values = [store.get(key) for key in keys]
    damaged = damage(Stored(values, foreign, layout), rng)
    in_time = _reads(store) - reads == len(keys)
    let_through(store, NOTHING, *(("SET", keys[at], value) for at, value in damaged.items()))
    return Loot(values[0], in_time)


def _reads(store: redis.Redis) -> int:
    """Return how many values anybody has read so far."""
    counted = store.info("commandstats")
    return sum(int(counted.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in _READS)
