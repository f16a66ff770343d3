"""The operator's view of Redis, against a real redis-server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.runtime.compose.store import _REMOVE, _SCAN
from deploy.runtime.host import find_redis_server
from deploy.runtime.secrets import Secret
from deploy.runtime.store import Store, open_store

PASSWORD = "open sesame"
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a redis-server that asks for a password."""
    program = find_redis_server(None, sys.executable)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        number = int(probe.getsockname()[1])
    folder = tmp_path_factory.mktemp("redis")
    options = ("--bind", HOST, "--port", str(number), "--requirepass", PASSWORD, "--save", "")
    with subprocess.Popen(
        (program, *options, "--maxmemory", "64mb", "--dir", str(folder)),
        stdout=(folder / "log").open("w"),
    ) as server:
        _wait_until_listening(number, folder / "log")
        yield number
        server.terminate()


def _wait_until_listening(port: int, log: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(log.read_text())


@pytest.fixture
def client(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(host=HOST, port=port, password=PASSWORD) as made:
        made.flushall()
        made.config_resetstat()
        yield made


@pytest.fixture
def store(port: int) -> Iterator[Store]:
    with open_store(HOST, port, Secret(PASSWORD)) as opened:
        yield opened


class TestPing:
    def test_with_the_password(self, store: Store) -> None:
        assert store.ping() is True

    @pytest.mark.parametrize("password", [None, Secret("wrong")])
    def test_without_it(self, port: int, password: Secret | None) -> None:
        with open_store(HOST, port, password) as other:
            assert other.ping() is False

    def test_nobody_there(self, free_port: int) -> None:
        with open_store(HOST, free_port, Secret(PASSWORD)) as nobody:
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
    @pytest.mark.usefixtures("keys")
    def test_counted(self, store: Store) -> None:
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

    def test_by_a_script_inside(self, keys: redis.Redis) -> None:
        """As it is done in a container."""
        assert keys.eval(f"{_SCAN} return #found", 0, MARK) == 4
        assert keys.eval(f"{_SCAN} {_REMOVE}", 0, MARK) == 8
        assert keys.dbsize() == 2500 + 3
        assert keys.exists(*OTHERS) == 3

    def test_nobody_there(self, free_port: int) -> None:
        with open_store(HOST, free_port, Secret(PASSWORD)) as nobody:
            assert nobody.count_marked(MARK) is None
            assert nobody.remove_marked(MARK) is None


class TestStats:
    def test_keys_and_memory(self, store: Store, client: redis.Redis) -> None:
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

    def test_flushes_are_counted(self, store: Store, client: redis.Redis) -> None:
        client.flushall()
        client.flushdb()
        stats = store.stats()
        assert stats is not None
        assert stats.flushes == 2

    def test_deleting_is_no_flush(self, store: Store, client: redis.Redis) -> None:
        client.set("a", 1)
        client.delete("a")
        stats = store.stats()
        assert stats is not None
        assert stats.flushes == 0

    def test_evictions_are_counted(self, store: Store, client: redis.Redis) -> None:
        client.config_set("maxmemory-policy", "allkeys-lru")
        for number in range(80):
            client.set(f"chunk-{number}", b"x" * 2**20)
        stats = store.stats()
        assert stats is not None
        assert stats.evicted_keys > 0
        assert stats.keys < 80

    def test_the_run_id_is_that_of_the_server(self, store: Store, client: redis.Redis) -> None:
        stats = store.stats()
        assert stats is not None
        assert stats.run_id == client.info("server")["run_id"]

    def test_traffic_is_counted(self, store: Store, client: redis.Redis) -> None:
        before = store.stats()
        client.set("chunk", b"x" * 500_000)
        client.get("chunk")
        after = store.stats()
        assert before is not None and after is not None
        assert (after.grown("commands", before) or 0) >= 2
        for name in ("received_bytes", "sent_bytes"):
            assert 500_000 < (after.grown(name, before) or 0) < 600_000
        assert after.clients == 2

    def test_none_with_a_wrong_password(self, port: int) -> None:
        with open_store(HOST, port, Secret("wrong")) as other:
            assert other.stats() is None

    def test_none_where_nobody_is(self, free_port: int) -> None:
        with open_store(HOST, free_port, None) as nobody:
            assert nobody.stats() is None


def test_a_redis_that_does_not_answer_is_not_waited_for_long() -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        began = time.monotonic()
        with open_store(HOST, silent.getsockname()[1], None) as store:
            assert store.ping() is False
        assert time.monotonic() - began < 3 * 2.0
