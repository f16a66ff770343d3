"""Damage of every kind, at random: what is loaded is right, and ends before the damage."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from pdkit_connector.redis_path import protocol
from pdkit_connector.redis_path.value import HEADER_BYTES, Codec
from redis_chunks import (
    CODEC,
    LIMITS,
    Memory,
    Pool,
    Warnings,
    client,
    header,
    loaded,
    payload,
    prompt,
    stored,
)
from redis_servers import Servers, eventually

TRIALS = 1000
CHUNKS = 8
OTHER = Codec("another layout")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("redis")) as servers:
        yield servers.start()


@pytest.fixture
def warnings():
    with Warnings() as told:
        yield told


# Each damages the chunk at an index and returns how many chunks are good, from the first on.


def flip_a_bit(redis, keys, at, rng):
    offset = rng.randrange(redis.strlen(keys[at]))
    byte = redis.getrange(keys[at], offset, offset)[0] ^ 1 << rng.randrange(8)
    redis.setrange(keys[at], offset, bytes([byte]))
    return at


def truncate(redis, keys, at, rng):
    value = redis.get(keys[at])
    # As often as not at a length that may be special.
    lengths = (rng.randrange(len(value)), *(0, HEADER_BYTES - 1, HEADER_BYTES, len(value) - 1))
    redis.set(keys[at], value[: rng.choice(lengths)])
    return at


def append(redis, keys, at, rng):
    redis.append(keys[at], rng.randbytes(rng.randrange(1, 3 * HEADER_BYTES)))
    return at


def swap(redis, keys, at, rng):
    other = rng.choice([i for i in range(CHUNKS) if i != at])
    mine, others = redis.mget(keys[at], keys[other])
    redis.mset({keys[at]: others, keys[other]: mine})
    return min(at, other)


def plant_another_layout(redis, keys, at, rng):
    data = payload(rng.random())
    redis.set(keys[at], OTHER.header(header(keys[at], data, OTHER), data) + data)
    return at


def plant_another_value_of_this_key(redis, keys, at, rng):
    """What is stored under the same key is the same chunk: its length alone may betray it."""
    data = payload(rng.random(), 100)
    value = CODEC.header(header(keys[at], data), data) + data
    redis.set(keys[at], value[:-1])
    return at


def delete(redis, keys, at, rng):
    redis.delete(keys[at])
    return at


def make_a_list(redis, keys, at, rng):
    redis.delete(keys[at])
    redis.lpush(keys[at], b"not a string")
    return at


DAMAGES: list[Callable[..., int]] = [
    flip_a_bit,
    truncate,
    append,
    swap,
    plant_another_layout,
    plant_another_value_of_this_key,
    delete,
    make_a_list,
]


def test_a_thousand_trials_return_no_wrong_byte(server, monkeypatch):
    rng = random.Random(5)
    one = client(server.url)
    prefixes = set()
    for trial in range(TRIALS):
        # A chunk of 4 KiB in one range, and in several.
        for name in ("_FIRST_BYTES", "_RANGE_BYTES"):
            monkeypatch.setattr(protocol, name, rng.choice((1 << 20, 1000)))
        chunks = prompt(f"prompt {trial}", CHUNKS)
        keys = list(chunks)
        assert stored(one, chunks) == keys
        damage = DAMAGES[trial % len(DAMAGES)]
        good = damage(server.admin, keys, rng.randrange(CHUNKS), rng)
        assert loaded(one, keys) == list(chunks.values())[:good], (trial, damage.__name__)
        prefixes.add((damage.__name__, good))
        server.admin.delete(*keys)
    # All places were hit in all ways; and none of it was taken for a failure of Redis.
    assert len(prefixes) >= len(DAMAGES) * CHUNKS - 2
    assert one.counters.value("failures") == 0
    assert one.counters.value("chunks", result="paused") == 0
    for kind in ("corrupt", "foreign", "missing"):
        assert one.counters.value("chunks", operation="load", result=kind) > 50
    one.close()


def test_whole_prompts_come_back_over_the_same_connections(server):
    one = client(server.url)
    chunks = prompt("whole", 50)
    assert stored(one, chunks) == list(chunks)
    for _ in range(20):
        assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.counters.value("connects") <= 4  # two lanes each way
    assert one.counters.value("chunks", operation="load", result="loaded") == 20 * 50
    assert one.counters.value("bytes", operation="load") == 20 * 50 * 4096
    assert one.counters.value("bytes", operation="store") == 50 * 4096
    one.close()


def test_missing_chunk_costs_no_connection_when_nothing_else_was_asked_for(server):
    one = client(server.url)
    for _ in range(10):
        assert loaded(one, [b"nobody has it"]) == []
    assert one.counters.value("connects") <= 2
    one.close()


def test_damage_is_reported_once(server, warnings):
    one = client(server.url)
    chunks = prompt("told", 4)
    stored(one, chunks)
    for key in chunks:
        server.admin.append(key, b"more")
    for key in chunks:
        assert loaded(one, [key]) == []
    assert len(warnings) == 1
    assert "told:0" in warnings[0]
    one.close()


def test_target_of_another_size_is_refused_and_released(server):
    class Small(Pool):
        def allocate(self, header, _deadline):
            self.handed.append(Memory(header.payload_bytes - 1))
            return self.handed[-1]

    one = client(server.url)
    chunks = prompt("small", 3)
    stored(one, chunks)
    assert loaded(one, list(chunks), Small()) == []
    assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.counters.value("failures") == 0
    one.close()


def test_missing_memory_ends_the_prompt_and_is_not_a_failure_of_redis(server):
    class Scarce(Pool):
        def allocate(self, header, deadline):
            return super().allocate(header, deadline) if len(self.handed) < 3 else None

    one = client(server.url)
    chunks = prompt("scarce", 8)
    stored(one, chunks)
    got = loaded(one, list(chunks), Scarce())
    assert got == list(chunks.values())[: len(got)]
    assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.counters.value("failures") == 0
    assert one.counters.value("chunks", operation="load", result="no_memory") > 0
    one.close()


def test_rest_of_a_bad_value_is_not_an_answer_to_the_next_question(server):
    one = client(server.url)
    chunks = prompt("next", 1)
    stored(one, chunks)
    server.admin.set("bad", bytes(HEADER_BYTES) + b"$-1\r\n" * 100)
    for _ in range(10):
        assert loaded(one, [b"bad"]) == []
        assert loaded(one, list(chunks)) == list(chunks.values())
    one.close()


def test_chunks_that_arrive_after_the_caller_left_are_released(server):
    one = client(server.url, replace(LIMITS, load_s=0.2))
    chunks = prompt("late", 2, 100)
    stored(one, chunks)
    left = threading.Event()
    pool = Pool(lambda _count: left.wait(60))

    def begun():
        assert one.loads.load(list(chunks), pool.allocate) == []
        return pool.handed

    eventually(begun, 20)  # on a busy machine the caller may leave before a chunk is there
    left.set()
    eventually(lambda: pool.balanced([]), 2)
    eventually(lambda: loaded(one, list(chunks)) == list(chunks.values()), 2)
    one.close()
