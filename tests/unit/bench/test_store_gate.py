"""The gate that makes a gap between a store and its load, on a real Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from bench import store_gate
from bench.redis_server import HOST, RedisServer
from bench.store_gate import NOTHING, at_each_store, held, let_through, writes_held

STORES = 50


@pytest.fixture
def store(tmp_path: Path) -> Iterator[redis.Redis]:
    with RedisServer(tmp_path) as server:
        yield redis.Redis(HOST, server.port)


def await_held(store: redis.Redis) -> None:
    until = time.monotonic() + 60
    while not held(store):
        assert time.monotonic() < until


def test_a_write_waits_until_the_end(store: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool:
        with writes_held(store):
            written = pool.submit(store.set, "key", b"x")
            await_held(store)
            assert held(store) == ["set"]
            assert store.get("key") is None and not written.done()
        assert written.result(60) is True
    assert store.get("key") == b"x" and held(store) == []


def test_no_client_passes_the_gate(store: redis.Redis) -> None:
    def stored_and_read(number: int) -> bytes | None:
        store.set(f"key {number}", b"x")
        found: bytes | None = store.get(f"key {number}")
        return found

    with at_each_store(store, lambda: let_through(store, ("FLUSHALL",))):
        assert [stored_and_read(number) for number in range(STORES)] == [None] * STORES
    assert stored_and_read(STORES) == b"x"


def test_later_writes_are_held_again(store: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool, writes_held(store):
        first = pool.submit(store.set, "first", b"x")
        await_held(store)
        assert let_through(store, NOTHING, ("STRLEN", "first")) == [0, 1]
        assert first.result(60) is True
        second = pool.submit(store.set, "second", b"x")
        await_held(store)
        assert store.get("second") is None and not second.done()


def test_other_commands_than_writes_do_not_wait(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_gate, "_PATIENCE_S", 0.1)
    with writes_held(store), pytest.raises(TimeoutError, match="'GET'"):
        let_through(store, ("GET", "key"))


def test_a_command_that_fails_is_reported(store: redis.Redis) -> None:
    store.set("text", b"x")
    with writes_held(store), pytest.raises(redis.ResponseError, match="integer"):
        let_through(store, ("INCR", "text"))


def test_a_failure_of_a_store_is_reported(store: redis.Redis) -> None:
    def act() -> None:
        let_through(store, NOTHING)
        raise ValueError("of the test's own")

    with pytest.raises(ValueError, match="own"), at_each_store(store, act):
        store.set("key", b"x")
