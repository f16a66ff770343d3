"""Several Redis that share the keys: where keys lie, and what becomes of them when one fails."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from pdkit_connector.redis_path.settings import Limits
from pdkit_connector.redis_path.value import HEADER_BYTES
from redis_chunks import LIMITS, Warnings, client, loaded, prompt, stored
from redis_limits import unpaused, within
from redis_servers import Server, eventually

CHUNKS = prompt("chunk", 40)
KEYS = list(CHUNKS)
SHORT = Limits(lookup_s=0.8, load_s=1.2, store_s=1.2)


@pytest.fixture
def pair(servers) -> list[Server]:
    return [servers.start(), servers.start()]


@pytest.fixture
def make(pair):
    made = []

    def start(limits=LIMITS, servers=pair):
        made.append(client([server.url for server in servers], limits))
        return made[-1]

    yield start
    for one in made:
        one.close()


def keys_on(server: Server) -> set[bytes]:
    return set(server.admin.keys())


def test_chunks_are_spread_by_key_and_every_client_finds_them(pair, make):
    assert stored(make(), CHUNKS) == KEYS
    first, second = map(keys_on, pair)
    assert first | second == set(KEYS)
    assert not first & second
    assert min(len(first), len(second)) > len(KEYS) // 4
    other = make()
    assert other.lookups.held(KEYS, HEADER_BYTES + 4096) == len(KEYS)
    assert loaded(other, KEYS) == list(CHUNKS.values())
    assert other.lookups.remove(KEYS) == len(KEYS)
    assert not keys_on(pair[0]) | keys_on(pair[1])


def test_a_single_shard_has_all_chunks(pair, make):
    one = make(servers=pair[:1])
    assert stored(one, CHUNKS) == KEYS
    assert keys_on(pair[0]) == set(KEYS)
    pair[0].kill()
    assert one.lookups.held(KEYS) == 0
    assert "shard" not in str(one.counters.all())


def test_order_of_the_shards_is_part_of_the_address(pair, make):
    """Clients that have them in another order find nothing; what they find is never wrong."""
    assert stored(make(), CHUNKS) == KEYS
    turned = make(servers=pair[::-1])
    assert turned.lookups.held(KEYS) == 0
    assert loaded(turned, KEYS) == []


@pytest.mark.parametrize("dead", [0, 1])
def test_chunks_of_a_dead_shard_are_misses_and_all_others_hits(pair, make, dead):
    one = make()
    assert stored(one, CHUNKS) == KEYS
    theirs = keys_on(pair[dead])
    pair[dead].kill()
    left = [key for key in KEYS if key not in theirs]
    prefix = next(place for place, key in enumerate(KEYS) if key in theirs)
    with Warnings() as told:
        for _ in range(3):
            assert one.lookups.held(KEYS) == prefix
            assert loaded(one, KEYS) == list(CHUNKS.values())[:prefix]
            # At once, with no pause: the other shard has done nothing wrong.
            assert one.lookups.held(left) == len(left)
            assert loaded(one, left) == [CHUNKS[key] for key in left]
    assert len(told) == 1
    assert f"reading shard {dead} failed" in told[0]
    assert one.counters.value("failures", shard=str(dead)) > 0
    assert one.counters.value("failures", shard=str(1 - dead)) == 0
    misses = one.counters.value("chunks", operation="lookup", result="miss")
    assert misses == 3 * (len(KEYS) - prefix)


def test_stores_to_a_dead_shard_are_counted_and_the_others_arrive(pair, make):
    one = make(replace(SHORT, store_s=20))
    theirs = set(stored(one, CHUNKS)) & keys_on(pair[1])
    pair[1].kill()
    assert set(stored(one, CHUNKS)) == set(KEYS) - theirs
    left_out = sum(
        one.counters.value("chunks", operation="store", result=result)
        for result in ("failed", "paused", "late")
    )
    assert left_out == len(theirs)


def test_shard_that_comes_back_is_used_again(pair, make):
    one = make()
    assert stored(one, CHUNKS) == KEYS
    pair[1].kill()
    assert one.lookups.held(KEYS) < len(KEYS)
    pair[1].start()
    eventually(lambda: stored(one, CHUNKS) == KEYS, 20)
    eventually(lambda: one.lookups.held(KEYS) == len(KEYS), 20)
    assert loaded(one, KEYS) == list(CHUNKS.values())


def test_a_shard_that_hangs_costs_its_own_chunks_and_the_time_of_one(pair, make):
    one = make(SHORT)
    eventually(lambda: stored(one, CHUNKS) == KEYS, 20)
    assert one.lookups.held(KEYS) == len(KEYS)
    hung = keys_on(pair[0])
    left = [key for key in KEYS if key not in hung]
    pair[0].stop_answering()
    for _ in range(3):
        unpaused(one)
        with within(SHORT.lookup_s):
            assert one.lookups.held(KEYS) == next(n for n, key in enumerate(KEYS) if key in hung)
        assert one.lookups.held(left) == len(left)
        unpaused(one)
        with within(SHORT.load_s):
            assert set(loaded(one, KEYS)) <= set(CHUNKS.values())
        assert loaded(one, left) == [CHUNKS[key] for key in left]
    assert one.counters.value("failures", shard="1") == 0
    assert one.counters.value("failures", shard="0", kind="timeout") > 0
    pair[0].answer_again()
    # Late answers to questions that were given up are never taken for those to others.
    eventually(lambda: one.lookups.held(KEYS) == len(KEYS), 20)
    assert one.lookups.held([b"absent", *KEYS]) == 0
    assert loaded(one, KEYS) == list(CHUNKS.values())


def test_all_shards_are_asked_before_the_first_answer_is_read(pair, make):
    """While the first shard hangs, the other has got its questions all the same."""
    one = make()
    assert stored(one, CHUNKS) == KEYS
    assert one.lookups.held(KEYS) == len(KEYS)
    pair[0].stop_answering()
    before = pair[1].admin.info("commandstats")["cmdstat_strlen"]["calls"]
    found = []
    asking = threading.Thread(target=lambda: found.append(one.lookups.held(KEYS)))
    asking.start()

    def asked() -> bool:
        return pair[1].admin.info("commandstats")["cmdstat_strlen"]["calls"] > before

    eventually(asked, LIMITS.lookup_s / 2)
    assert not found
    pair[0].answer_again()
    asking.join(LIMITS.lookup_s)
    assert found == [len(KEYS)]
