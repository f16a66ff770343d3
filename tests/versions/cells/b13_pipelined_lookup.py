"""B13: a prompt of 32 chunks is looked up and loaded in a few round trips, not one a chunk."""

from __future__ import annotations

from typing import Any

from lmcache_objects import config, key, metadata, remote_backend
from redis_path import RoundTrips, client, fill_of, manager, on_loop, store

CHUNKS = 32
FEW = 4


def cell() -> None:
    redis = client()
    relay = RoundTrips()
    backend = remote_backend(config(remote_url=f"redis://127.0.0.1:{relay.port}"), metadata())
    storage = manager(backend)
    keys = [key(number) for number in range(CHUNKS)]
    store(backend, keys)

    before = relay.count
    assert hits(storage.batched_contains(keys, None, True)) == CHUNKS
    assert relay.count - before <= FEW, f"{relay.count - before} round trips for a lookup"

    before = relay.count
    found = storage.batched_get(keys, location="RemoteBackend")
    assert [fill_of(memory_obj) for memory_obj in found] == list(range(1, CHUNKS + 1))
    assert relay.count - before <= 2 * FEW, f"{relay.count - before} round trips for a load"

    before = relay.count
    assert on_loop(backend, backend.batched_async_contains("a", keys, True)) == CHUNKS
    assert relay.count - before <= FEW, f"{relay.count - before} round trips, asynchronously"

    redis.delete(keys[5].to_string() + "metadata")
    assert hits(storage.batched_contains(keys, None, True)) == 5
    assert on_loop(backend, backend.batched_async_contains("a", keys, True)) == 5
    found = backend.batched_get_blocking(keys)
    assert [memory_obj is not None for memory_obj in found[:7]] == [True] * 5 + [False] * 2
    assert hits(storage.batched_contains([key(99)], None, True)) == 0


def hits(answer: Any) -> int:
    """Return how many leading chunks a storage manager found, in any release's answer."""
    if isinstance(answer, tuple):
        return int(answer[0])
    assert answer == sorted(answer, reverse=True), "hits behind a miss"
    return sum(answer)
