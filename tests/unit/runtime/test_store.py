"""The operator's view of Redis, against a real redis-server."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.runtime.compose.container_store import _FIND
from deploy.runtime.redis_client import SocketStore, open_store
from deploy.runtime.secrets import Secret
from deploy.runtime.store import Store, open_shards

PASSWORD = "open sesame"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a redis-server that asks for a password."""
    options = ("--requirepass", PASSWORD, "--maxmemory", "64mb")
    with RedisServer(tmp_path_factory.mktemp("redis"), *options) as server:
        yield server.socket


@pytest.fixture
def client(place: str) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=place, password=PASSWORD) as made:
        made.flushall()
        made.config_resetstat()
        yield made


@pytest.fixture
def store(place: str) -> Iterator[SocketStore]:
    with open_store(place, Secret(PASSWORD)) as opened:
        yield opened


class TestPing:
    def test_a_ping_with_the_password_succeeds(self, store: SocketStore) -> None:
        assert store.ping() is True

    @pytest.mark.parametrize("password", [None, Secret("wrong")])
    def test_a_ping_without_the_password_fails(self, place: str, password: Secret | None) -> None:
        with open_store(place, password) as other:
            assert other.ping() is False

    def test_a_ping_without_a_server_fails(self, tmp_path: Path) -> None:
        with open_store(str(tmp_path / "none"), Secret(PASSWORD)) as nobody:
            assert nobody.ping() is False


def test_a_store_is_reached_by_host_and_port(tmp_path: Path) -> None:
    """As a pod reaches the Redis of another."""
    with RedisServer(tmp_path, "--requirepass", PASSWORD) as server:
        where = (HOST, server.port)
        with open_store(where, Secret(PASSWORD)) as right:
            assert right.ping() is True
            assert right.marked_keys(MARK) == set()
        with open_store(where, Secret("wrong")) as wrong:
            assert wrong.ping() is False
    with open_store(where, Secret(PASSWORD)) as nobody:
        assert nobody.ping() is False


MARK = "@pdkit%check-0a1b"
# Before the tag of a layout, at the end, with a layer, and as LMCache's own client has them.
MARKED = [
    "a:m@1@h1@bf16@pdkit%check-0a1b-1@kv", "a:m@1@h2@bf16@pdkit%check-0a1b-12-",
    "a:m@1@h2@bf16@3@pdkit%check-0a1b-12-", "m@1@h4@bf16@pdkit%check-0a1b-2-kv_bytes",
]  # fmt: skip
TWINS = ["a:m@1@h1@bf16@kv", "a:m@1@h2@bf16", "a:m@1@h2@bf16@3", "m@1@h4@bf16kv_bytes"]
OTHERS = ["a:m@1@h3@bf16@kv", "a:m@1@h1@bf16@pdkit%check-ffff-1@kv", "a:m@1@h1@bf16@other%x@kv"]


@pytest.fixture
def keys(client: redis.Redis) -> redis.Redis:
    for key in (*MARKED, *TWINS, *OTHERS, *(f"many:{n}" for n in range(2500))):
        client.set(key, 1)
    return client


class TestMarked:
    @pytest.fixture
    def store(self, place: str) -> Iterator[Store]:
        with open_shards([open_store(place, Secret(PASSWORD))]) as opened:
            yield opened

    @pytest.mark.usefixtures("keys")
    def test_marked_keys_are_counted(self, store: Store) -> None:
        assert store.count_marked(MARK) == 4
        assert store.count_marked(f"{MARK}-1@") == 1
        assert store.count_marked("@pdkit%check-9999") == 0

    def test_removed_with_their_twins_and_nothing_else(
        self, store: Store, keys: redis.Redis
    ) -> None:
        assert store.remove_marked(MARK) == 8
        assert not keys.exists(*MARKED, *TWINS)
        assert keys.exists(*OTHERS) == 3
        assert keys.dbsize() == 2500 + 3
        assert store.remove_marked(MARK) == 0

    def test_marked_keys_are_found_by_a_script_in_redis(self, keys: redis.Redis) -> None:
        """As it is done in a container."""
        number, *found = keys.eval(_FIND, 0, MARK)
        assert (number, sorted(found)) == (b"4", sorted(key.encode() for key in MARKED))

    def test_marked_keys_are_unknown_without_a_server(self, tmp_path: Path) -> None:
        with open_shards([open_store(str(tmp_path / "none"), Secret(PASSWORD))]) as nobody:
            assert nobody.count_marked(MARK) is None
            assert nobody.remove_marked(MARK) is None


class TestStats:
    def test_keys_and_memory(self, store: SocketStore, client: redis.Redis) -> None:
        before = store.stats()
        for number in range(3):
            client.set(f"chunk-{number}", b"x" * 100_000)
        after = store.stats()
        assert before is not None
        assert after is not None
        assert (before.keys, after.keys) == (0, 3)
        assert after.used_memory_bytes - before.used_memory_bytes > 250_000
        assert after.max_memory_bytes == 64 * 2**20
        assert (after.evicted_keys, after.flushes) == (0, 0)

    def test_flushes_are_counted(self, store: SocketStore, client: redis.Redis) -> None:
        client.flushall()
        client.flushdb()
        stats = store.stats()
        assert stats is not None
        assert stats.flushes == 2

    def test_deleting_is_not_a_flush(self, store: SocketStore, client: redis.Redis) -> None:
        client.set("a", 1)
        client.delete("a")
        stats = store.stats()
        assert stats is not None
        assert stats.flushes == 0

    def test_evictions_are_counted(self, store: SocketStore, client: redis.Redis) -> None:
        client.config_set("maxmemory-policy", "allkeys-lru")
        for number in range(80):
            client.set(f"chunk-{number}", b"x" * 2**20)
        stats = store.stats()
        assert stats is not None
        assert stats.evicted_keys > 0
        assert stats.keys < 80

    def test_the_run_id_is_that_of_the_server(
        self, store: SocketStore, client: redis.Redis
    ) -> None:
        stats = store.stats()
        assert stats is not None
        assert stats.run_id == client.info("server")["run_id"]

    def test_traffic_is_counted(self, store: SocketStore, client: redis.Redis) -> None:
        before = store.stats()
        client.set("chunk", b"x" * 500_000)
        client.get("chunk")
        after = store.stats()
        assert before is not None and after is not None
        assert (after.grown("commands", before) or 0) >= 2
        for name in ("received_bytes", "sent_bytes"):
            assert 500_000 < (after.grown(name, before) or 0) < 600_000
        assert after.clients == 2

    def test_there_are_no_stats_with_a_wrong_password(self, place: str) -> None:
        with open_store(place, Secret("wrong")) as other:
            assert other.stats() is None

    def test_there_are_no_stats_without_a_server(self, tmp_path: Path) -> None:
        with open_store(str(tmp_path / "none"), None) as nobody:
            assert nobody.stats() is None


def test_a_redis_that_does_not_answer_is_not_waited_for_long(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        began = time.monotonic()
        with open_store(path, None) as store:
            assert store.ping() is False
        assert time.monotonic() - began < 3 * 2.0
