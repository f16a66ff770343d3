"""Values that take several ranges to read."""

from __future__ import annotations

import threading

import pytest
import redis
from pdkit_connector.redis_path import protocol
from pdkit_connector.redis_path.pool import Links
from pdkit_connector.redis_path.value import HEADER_BYTES, Codec, PayloadChecksum, digest
from redis_chunks import CODEC, LAYOUT, Pool, client, header, loaded, payload, prompt, stored
from redis_servers import Servers

RANGE = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("redis")) as servers:
        yield servers.start()


@pytest.fixture
def one(server, monkeypatch):
    monkeypatch.setattr(protocol, "_FIRST_BYTES", RANGE)
    monkeypatch.setattr(protocol, "_RANGE_BYTES", RANGE)
    server.admin.flushall()
    made = client(server.url)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, RANGE - 1, RANGE, RANGE + 1, 2 * RANGE, 7 * RANGE + 13])
def test_values_of_any_length_are_read(one, size):
    chunks = prompt("any", 5, size)
    assert len(stored(one, chunks)) == 5
    assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.counters.value("connects") <= 4, "each connection is read to its end and kept"


def test_values_of_different_lengths_are_read_together(one):
    chunks = {}
    for size in (10, 5 * RANGE, RANGE, 3 * RANGE + 1, 0, 2 * RANGE):
        chunks |= prompt(f"of {size}", 1, size)
    stored(one, chunks)
    assert loaded(one, list(chunks)) == list(chunks.values())


@pytest.mark.parametrize("ranges", range(6))
def test_a_value_cut_at_the_end_of_a_range_is_refused(one, server, ranges):
    chunks = prompt("cut", 3, 6 * RANGE)
    stored(one, chunks)
    keys = list(chunks)
    first = HEADER_BYTES + RANGE
    server.admin.set(keys[1], server.admin.get(keys[1])[: first + ranges * RANGE - RANGE])
    assert loaded(one, keys) == [chunks[keys[0]]]
    assert loaded(one, [keys[2]]) == [chunks[keys[2]]], "the connection is as good as before"


def test_a_value_longer_by_a_byte_is_refused(one, server):
    chunks = prompt("longer", 2, 3 * RANGE)
    stored(one, chunks)
    server.admin.append(list(chunks)[1], b"x")
    assert loaded(one, list(chunks)) == [chunks[next(iter(chunks))]]
    assert one.counters.value("chunks", operation="load", result="corrupt") == 1


def test_a_value_removed_while_it_is_read_is_a_miss(one, server):
    """As when Redis evicts a chunk that a load has begun to read."""
    chunks = prompt("removed", 1, 9 * RANGE)
    stored(one, chunks)
    (key,) = chunks
    pool = Pool(then=lambda _: server.admin.delete(key))
    assert loaded(one, [key], pool) == []
    assert one.counters.value("chunks", operation="load", result="missing") == 1
    assert one.counters.value("chunks", operation="load", result="corrupt") == 0


def test_another_keys_value_put_there_while_it_is_read_is_refused(one, server):
    """Ranges of two values are never taken for one."""
    chunks = prompt("replaced", 2, 9 * RANGE)
    stored(one, chunks)
    mine, others = chunks
    value = server.admin.get(others)
    pool = Pool(then=lambda _: server.admin.set(mine, value))
    assert loaded(one, [mine], pool) == []
    assert results(one) == {"foreign": 1}


def results(one) -> dict[str, float]:
    """Return what loads counted."""
    found = {
        labels["result"]: count
        for name, labels, count in one.counters.all()
        if name == "chunks" and labels["operation"] == "load"
    }
    found["replaced"] = one.counters.value("replaced")
    return {result: count for result, count in found.items() if count}


def value_of(key: bytes, seed: str, size: int = 9 * RANGE, codec: Codec = CODEC) -> bytes:
    """Return a value that a producer could store under this key."""
    data = payload(seed, size)
    return codec.header(header(key, data, codec), data) + data


# What another client does to a key between the first range of its value and the next, and what the
# load then finds: the bytes of which seed, and how often it was counted as what.
READ_AGAIN = {"loaded": 1, "replaced": 1}
BETWEEN_RANGES = {
    "another batch's bytes": (lambda r, k: r.set(k, value_of(k, "new")), 9, READ_AGAIN),
    "a shorter value": (lambda r, k: r.set(k, value_of(k, "new", 3 * RANGE)), 3, READ_AGAIN),
    "a longer value": (lambda r, k: r.set(k, value_of(k, "new", 30 * RANGE)), 30, READ_AGAIN),
    "one range": (lambda r, k: r.set(k, value_of(k, "new", RANGE // 2)), 0.5, READ_AGAIN),
    "gone": (lambda r, k: r.delete(k), None, {"missing": 1}),
    "a flipped bit": (lambda r, k: r.setrange(k, 5 * RANGE, b"\0\1\2\3"), None, {"corrupt": 1}),
    "a damaged value": (
        lambda r, k: r.set(k, value_of(k, "new")[:-9] + b"corrupted"), None, {"corrupt": 1},
    ),
    "a value of another layout": (
        lambda r, k: r.set(k, value_of(k, "new", codec=Codec("other"))), None, {"foreign": 1},
    ),
    "a list": (lambda r, k: (r.delete(k), r.lpush(k, "x")), None, {"foreign": 1}),
}  # fmt: skip


@pytest.mark.parametrize("change", BETWEEN_RANGES)
def test_a_value_that_changes_between_ranges_is_read_again_as_a_whole(one, server, change):
    """Half of one value and half of another is no damage, and no reason to compute the chunk."""
    change_it, ranges, counted = BETWEEN_RANGES[change]
    (key,) = prompt("changes", 1)
    server.admin.set(key, value_of(key, "old"))
    # Between the first range, which brings the header, and the others.
    pool = Pool(then=lambda handed: change_it(server.admin, key) if handed == 1 else None)
    expected = [] if ranges is None else [payload("new", int(ranges * RANGE))]
    assert loaded(one, [key], pool) == expected
    assert results(one) == counted
    assert one.counters.value("failures") == 0


def test_a_value_stored_again_as_it_was_is_no_damage(one, server, monkeypatch):
    """Two producers in turn: the header is the first one again when the checksum fails."""
    (key,) = prompt("in turn", 1)
    first, other = value_of(key, "first"), value_of(key, "other")
    server.admin.set(key, first)
    require = PayloadChecksum.require

    def stored_back(check):
        server.admin.set(key, first)
        require(check)

    monkeypatch.setattr(PayloadChecksum, "require", stored_back)
    pool = Pool(then=lambda handed: server.admin.set(key, other) if handed == 1 else None)
    assert loaded(one, [key], pool) == [payload("first", 9 * RANGE)]
    assert results(one) == READ_AGAIN


def test_the_chunks_behind_a_replaced_one_are_loaded_too(one, server):
    chunks = prompt("behind", 6, 9 * RANGE)
    stored(one, chunks)
    keys = list(chunks)
    again = value_of(keys[2], "another batch")

    class Replacing(Pool):
        def allocate(self, of, deadline):
            memory = super().allocate(of, deadline)
            if of.key == digest(keys[2]):
                server.admin.set(keys[2], again)
            return memory

    expected = chunks | {keys[2]: payload("another batch", 9 * RANGE)}
    assert loaded(one, keys, Replacing()) == list(expected.values())
    assert results(one) == {"loaded": 6, "replaced": 1}


def test_what_other_servers_send_meanwhile_stays(one, server, monkeypatch):
    """In a cluster the next value, which was asked for already, may come from another server."""
    nodes = [("first", 1), ("second", 2)]  # of one server, each with a connection of its own

    def spread(links, deadline):
        return lambda key: nodes[key[-1] % 2]

    monkeypatch.setattr(Links, "route", spread)
    keys = [f"spread:{i}".encode() for i in range(4)]
    chunks = dict(zip(keys, prompt("spread", 4, 9 * RANGE).values(), strict=True))
    stored(one, chunks)
    # Both of a lane's values, so that one is replaced while the other is on its way.
    wanted = [keys[0], keys[1], keys[1], keys[2]]
    before = one.counters.value("connects")

    class Replacing(Pool):
        def allocate(self, of, deadline):
            memory = super().allocate(of, deadline)
            if of.key == digest(keys[0]):
                server.admin.set(keys[0], value_of(keys[0], f"batch {len(self.handed)}"))
            return memory

    got = loaded(one, wanted, Replacing())
    assert got[1:] == [chunks[keys[1]], chunks[keys[1]], chunks[keys[2]]]
    assert results(one) == {"loaded": 4, "replaced": 1}
    assert one.counters.value("failures") == 0
    assert one.counters.value("connects") <= before + 5
    more = [keys[3], keys[3], keys[2], keys[1]]
    assert loaded(one, more) == [chunks[key] for key in more], "each answer was read by its asker"


def test_damage_that_stays_is_read_twice_and_counted_once(one, server):
    chunks = prompt("damage", 1, 9 * RANGE)
    stored(one, chunks)
    (key,) = chunks
    server.admin.setrange(key, 5 * RANGE, b"xxxx")
    pool = Pool()
    assert loaded(one, [key], pool) == []
    assert results(one) == {"corrupt": 1}
    assert len(pool.handed) == 2


def test_damage_within_one_range_is_read_once(one, server):
    chunks = prompt("small", 1, RANGE - 1)
    stored(one, chunks)
    (key,) = chunks
    server.admin.setrange(key, RANGE // 2, b"xxxx")
    pool = Pool()
    assert loaded(one, [key], pool) == []
    assert results(one) == {"corrupt": 1}
    assert len(pool.handed) == 1


def test_a_whole_value_in_one_command_may_be_longer_than_its_memory_was(one, server):
    """The bytes behind a value that is too long do not answer the next question."""
    chunks = prompt("next", 1, 3 * RANGE)
    stored(one, chunks)
    (key,) = prompt("long", 1)
    server.admin.set(key, value_of(key, "old") + bytes(50 * RANGE))
    for _ in range(5):
        assert loaded(one, [key]) == []
        assert loaded(one, list(chunks)) == list(chunks.values())
    assert results(one) == {"corrupt": 5, "loaded": 5}


@pytest.mark.parametrize("secret", [b"", b"a secret"])
def test_two_producers_that_replace_a_value_all_the_time(server, secret):
    """As in a stack whose producers compute one prompt at once: bf16 KV of two batches differs."""
    codec = Codec(LAYOUT, secret=secret)
    one = client(server.url, codec=codec)
    (key,) = prompt("contested", 1)
    size = 16 << 20
    values = [value_of(key, seed, size, codec) for seed in ("one batch", "another")]
    server.admin.set(key, values[0])
    ended = threading.Event()

    def produce(value):
        with redis.Redis.from_url(server.url) as own:
            while not ended.is_set():
                own.set(key, value)

    producers = [threading.Thread(target=produce, args=(value,)) for value in values]
    for producer in producers:
        producer.start()
    try:
        found = [loaded(one, [key]) for _ in range(20)]
    finally:
        ended.set()
        for producer in producers:
            producer.join()
        one.close()
    valid = [value[HEADER_BYTES:] for value in values]
    assert [len(each) for each in found] == [1] * 20
    assert all(data in valid for (data,) in found)
    counted = results(one)
    assert counted.pop("loaded") == 20
    assert set(counted) <= {"replaced"}, counted


def test_another_kind_of_key_costs_no_connection(one, server):
    chunks = prompt("kind", 2)
    stored(one, chunks)
    keys = list(chunks)
    server.admin.delete(keys[0])
    server.admin.lpush(keys[0], "not a string")
    loaded(one, [keys[1]])
    before = one.counters.value("connects")
    for _ in range(3):
        assert loaded(one, [keys[0]]) == []
    assert loaded(one, [keys[1]]) == [chunks[keys[1]]]
    assert one.counters.value("connects") <= before + 1  # the other lane's first
