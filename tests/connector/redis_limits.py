"""A client with short limits, and what it must do with a Redis that does not work."""

from __future__ import annotations

from contextlib import contextmanager

from pdkit_connector.redis_path.settings import Limits
from redis_chunks import loaded, stored

from tests.connector import fair_clock

LIMITS = Limits(lookup_s=0.2, load_s=0.4, store_s=0.4)
SLACK_S = 0.5
BACK_S = 2.0


@contextmanager
def within(seconds):
    began = fair_clock.now()
    yield
    took = fair_clock.now() - began
    assert took < seconds + SLACK_S, f"{took:.2f} s"


def works(one, chunks):
    """Tell whether chunks can be stored, found and loaded."""
    keys = list(chunks)
    return (
        stored(one, chunks) == keys
        and one.lookups.held(keys) == len(keys)
        and loaded(one, keys) == list(chunks.values())
    )


def all_miss_in_time(one, chunks, rounds=1):
    """Use a Redis that does not work in every way: nothing comes, nothing raises, nobody waits."""
    keys = list(chunks)
    for _ in range(rounds):
        unpaused(one)
        with within(LIMITS.lookup_s):
            assert one.lookups.held(keys) == 0
        unpaused(one)
        with within(LIMITS.lookup_s):
            assert one.lookups.remove(keys) <= 0
        unpaused(one)
        with within(LIMITS.load_s):
            assert loaded(one, keys) == []
        with within(LIMITS.store_s):
            assert stored(one, chunks) == []


def unpaused(one):
    """End the pauses after failures, which would end by themselves."""
    for shard in one.shards:
        for attempts in (shard.reads, shard.writes):
            attempts._backoff._until = 0.0
