"""Values that take several ranges to read."""

from __future__ import annotations

import pytest
from pdkit_connector.redis_path import reading
from pdkit_connector.redis_path.value import HEADER_BYTES
from redis_chunks import Pool, client, loaded, prompt, stored
from redis_servers import Servers

RANGE = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("redis")) as servers:
        yield servers.start()


@pytest.fixture
def one(server, monkeypatch):
    monkeypatch.setattr(reading, "_FIRST_BYTES", RANGE)
    monkeypatch.setattr(reading, "_RANGE_BYTES", RANGE)
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


def test_a_value_replaced_while_it_is_read_is_refused(one, server):
    """Ranges of two values are never taken for one."""
    chunks = prompt("replaced", 2, 9 * RANGE)
    stored(one, chunks)
    mine, others = chunks
    value = server.admin.get(others)
    pool = Pool(then=lambda _: server.admin.set(mine, value))
    assert loaded(one, [mine], pool) == []
    assert one.counters.value("chunks", operation="load", result="corrupt") == 1


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
