"""A user's Redis by its URL, against real servers: one, a Sentinel's master, a cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.metrics.store_stats import StoreStats
from deploy.runtime.url_store import FoundKeys, UrlStore, combined
from tests.ports import unused_port

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a redis-server with options, and return its port."""
    with ExitStack() as servers:
        yield (
            lambda *options, **more: (
                servers.enter_context(RedisServer(tmp_path, *options, **more)).port
            )
        )


@pytest.fixture
def store() -> Iterator[Callable[[str], UrlStore]]:
    with ExitStack() as opened:

        def made(url: str) -> UrlStore:
            one = UrlStore(parse_redis_url(url))
            opened.callback(one.close)
            return one

        yield made


def test_one_server_is_read_and_cleaned(start: Start, store: Callable[[str], UrlStore]) -> None:
    port = start("--requirepass", "open sesame", "--maxmemory", "64mb")
    mine = store(f"redis://:open%20sesame@{HOST}:{port}/3")
    assert mine.trouble() == ""
    with redis.Redis(HOST, port, 3, "open sesame") as client:
        client.mset({f"pdkit:a:{number}": b"x" for number in range(2500)})
        client.mset({"pdkit:a-b:1": b"x", "other": b"x"})
    stats = mine.stats()
    assert stats is not None
    assert (stats.keys, stats.max_memory_bytes, stats.flushes) == (2502, 64 << 20, 0)
    assert mine.count_keys("pdkit:a:", within_s=10) == FoundKeys(2500, all_seen=True)
    some = mine.count_keys("pdkit:a:", within_s=0)
    assert 0 < some.count < 2500
    assert not some.all_seen
    assert mine.remove_keys("pdkit:a:") == 2500
    after = mine.stats()
    assert after is not None
    assert after.keys == 2, "only those that begin so"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://{}", "Authentication required"),
        ("redis://:wrong@{}", "invalid"),
        ("redis-cluster://:secret@{}", "cluster support disabled"),
        # With its password, which Redis 8 wants before it says that it knows no SENTINEL.
        ("redis-sentinel://{}/main?sentinel_password=secret", "SENTINEL"),
        ("rediss://:secret@{}", ""),
    ],
)
def test_trouble_is_said_without_the_password(
    start: Start, store: Callable[[str], UrlStore], url: str, said: str
) -> None:
    bad = store(url.format(f"{HOST}:{start('--requirepass', 'secret')}"))
    trouble = bad.trouble()
    assert trouble
    assert said in trouble
    assert "secret" not in trouble
    assert "wrong" not in trouble
    assert bad.stats() is None


def test_a_missing_server_is_reported(store: Callable[[str], UrlStore], tmp_path: Path) -> None:
    port = unused_port()
    for where in (f"redis://{HOST}:{port}", f"unix://{tmp_path}/none",
                  f"redis-cluster://{HOST}:{port}"):  # fmt: skip
        nobody = store(where)
        assert nobody.trouble()
        assert nobody.stats() is None
        with pytest.raises(nobody.errors):
            nobody.count_keys("pdkit:a:", within_s=1)


def test_a_redis_that_does_not_answer_is_not_waited_for_long(
    store: Callable[[str], UrlStore],
) -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        began = time.monotonic()
        assert store(f"redis://{HOST}:{silent.getsockname()[1]}?socket_timeout=60").trouble()
        assert time.monotonic() - began < 3 * 2.0


@pytest.mark.parametrize("option", ["nonsense=1", "ssl_ca_certs=/ca.pem", "socket_timeout=long"])
def test_unknown_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"^not a Redis URL$"):
        UrlStore(parse_redis_url(f"redis://:secret@{HOST}?{option}"))


def test_stats_that_the_user_may_not_read_are_unknown(
    start: Start, store: Callable[[str], UrlStore]
) -> None:
    rights = ("on", ">secret", "~pdkit:*", "+getrange", "+set", "+strlen", "+unlink")
    port = start("--user", "kv", *rights)
    mine = store(f"redis://kv:secret@{HOST}:{port}")
    assert mine.trouble() == "", "it answers, if only that a PING is not allowed"
    assert mine.stats() == StoreStats(None, None, None, None, None, None)
    with pytest.raises(mine.errors, match="no permissions"):
        mine.count_keys("pdkit:a:", within_s=1)


def test_stats_that_the_user_may_read_are_known(
    start: Start, store: Callable[[str], UrlStore]
) -> None:
    port = start("--user", *["kv", "on", ">secret", "~pdkit:*", "+getrange", "+set", "+info"])
    stats = store(f"redis://kv:secret@{HOST}:{port}").stats()
    assert stats is not None
    assert stats.keys is None
    assert stats.run_id
    assert stats.used_memory_bytes
    assert (stats.max_memory_bytes, stats.flushes) == (0, 0)


def test_a_unix_socket_is_read(store: Callable[[str], UrlStore], tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "secret") as server:
        mine = store(f"unix://:secret@{server.socket}?db=2")
        assert mine.trouble() == ""
        assert mine.server_names() == ()


def test_the_master_of_a_sentinel_is_read(start: Start, store: Callable[[str], UrlStore]) -> None:
    master = start("--requirepass", "secret")
    watch = start(
        "--sentinel",
        config=f"sentinel monitor main {HOST} {master} 1\nsentinel auth-pass main secret\n",
    )
    mine = store(f"redis-sentinel://:secret@{HOST}:1,{HOST}:{watch}/main")
    assert mine.trouble() == "", "the first is not there, the second is"
    assert mine.server_names() == (HOST,)
    with redis.Redis(HOST, master, password="secret") as client:
        client.set("pdkit:a:1", b"x")
        stats = mine.stats()
        assert stats is not None
        assert stats.run_id == client.info("server")["run_id"]
    assert mine.remove_keys("pdkit:a:") == 1
    unknown = store(f"redis-sentinel://:secret@{HOST}:{watch}/other")
    assert "no master 'other'" in unknown.trouble()


def test_a_cluster_is_read_and_cleaned(start: Start, store: Callable[[str], UrlStore]) -> None:
    buses = [unused_port(), unused_port()]
    options = ("--cluster-enabled", "yes", "--maxmemory", "32mb", "--cluster-port")
    ports = [start(*options, str(bus)) for bus in buses]
    halves = ((0, 8191), (8192, 16383))
    clients = [redis.Redis(HOST, port) for port in ports]
    mine = store(f"redis-cluster://{HOST}:{ports[0]}")
    assert "slots" in mine.trouble()
    for client, (first, last) in zip(clients, halves, strict=True):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
    clients[0].execute_command("CLUSTER", "MEET", HOST, ports[1], buses[1])
    deadline = time.monotonic() + 20
    while mine.trouble() or clients[1].cluster("info")["cluster_state"] != "ok":
        assert time.monotonic() < deadline, mine.trouble()
        time.sleep(0.1)
    assert mine.server_names() == (HOST, HOST)
    with redis.RedisCluster(HOST, ports[0]) as cluster:
        for number in range(100):
            cluster.set(f"pdkit:a:{number}", b"x")
    sizes = [client.dbsize() for client in clients]
    assert min(sizes) > 0
    stats = mine.stats()
    assert stats is not None
    assert (stats.keys, stats.max_memory_bytes) == (100, 64 << 20)
    assert stats.run_id == " ".join(sorted(client.info("server")["run_id"] for client in clients))
    assert mine.count_keys("pdkit:a:", within_s=10) == FoundKeys(100, all_seen=True)
    assert mine.remove_keys("pdkit:a:") == 100
    assert [client.dbsize() for client in clients] == [0, 0]
    for client in clients:
        client.close()


def test_known_stats_are_summed() -> None:
    one = StoreStats(1, 10, 100, 5, 2, "b")
    assert combined([one, StoreStats(2, 20, 200, 6, 3, "a")]) == StoreStats(
        3, 30, 300, 11, 5, "a b"
    )
    unknown = StoreStats(None, None, None, None, None, None)
    assert combined([one, unknown]) == unknown
    busy = [
        StoreStats(1, 10, 100, 5, 2, run, n, 2 * n, 3 * n, 4) for n, run in ((1, "a"), (10, "b"))
    ]
    both = combined(busy)
    assert (both.commands, both.received_bytes, both.sent_bytes, both.clients) == (11, 22, 33, 8)
    assert combined([one, StoreStats(2, 20, 0, 6, 3, "a")]).max_memory_bytes == 0, "no limit"


def test_marked_keys_are_counted_and_removed(
    start: Start, store: Callable[[str], UrlStore]
) -> None:
    port = start()
    mine = store(f"redis://{HOST}:{port}")
    with redis.Redis(host=HOST, port=port) as client:
        client.mset({"a@h@pdkit%check-1-1@kv": 1, "a@h@kv": 1, "b@h@kv": 1})
        assert mine.count_marked("@pdkit%check-1") == 1
        assert mine.remove_marked("@pdkit%check-1") == 2
        assert client.keys() == [b"b@h@kv"]


def test_marked_keys_that_its_user_may_not_look_for(
    start: Start, store: Callable[[str], UrlStore]
) -> None:
    rights = ("on", ">secret", "~pdkit:*", "+getrange", "+set", "+strlen", "+unlink")
    mine = store(f"redis://kv:secret@{HOST}:{start('--user', 'kv', *rights)}")
    assert mine.count_marked("@pdkit%check-1") is None
    assert mine.remove_marked("@pdkit%check-1") is None


class TestRefusals:
    """What a server says instead of serving, and what it counts of that."""

    def test_a_serving_or_missing_server_has_no_refusal(
        self, start: Start, store: Callable[[str], UrlStore]
    ) -> None:
        port = start()
        assert store(f"redis://{HOST}:{port}").refusal() is None
        assert store(f"redis://{HOST}:{unused_port()}").refusal() is None

    def test_a_wrong_password_is_a_refusal(
        self, start: Start, store: Callable[[str], UrlStore]
    ) -> None:
        port = start("--requirepass", "open sesame")
        for url in (f"redis://:wrong@{HOST}:{port}", f"redis://{HOST}:{port}"):
            refusal = store(url).refusal()
            assert refusal is not None and refusal.denied
            assert "wrong" not in refusal.said

    def test_a_server_that_cannot_save_refuses(
        self, store: Callable[[str], UrlStore], tmp_path: Path
    ) -> None:
        options = ("--save", "3600 1", "--dbfilename", "taken")
        with RedisServer(tmp_path, *options) as server, redis.Redis(HOST, server.port) as client:
            (server.folder / "taken").mkdir()
            client.bgsave()
            deadline = time.monotonic() + 10
            while client.info("persistence")["rdb_last_bgsave_status"] != "err":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            mine = store(server.url)
            refusal = mine.refusal()
            assert refusal is not None and not refusal.denied
            assert refusal.said.startswith("MISCONF")
            stats = mine.stats()
        assert stats is not None and stats.errors["MISCONF"] >= 1

    def test_a_full_server_counts_its_refusals(
        self, start: Start, store: Callable[[str], UrlStore]
    ) -> None:
        port = start("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
        with redis.Redis(HOST, port) as client, pytest.raises(redis.OutOfMemoryError):
            client.set("x", b"x" * (2 << 20))
            client.set("y", b"y")
        stats = store(f"redis://{HOST}:{port}").stats()
        assert stats is not None
        assert (stats.policy, stats.errors.get("OOM"), stats.replica) == ("noeviction", 1, False)

    def test_a_replica_is_recognized(self, start: Start, store: Callable[[str], UrlStore]) -> None:
        port = start("--replicaof", HOST, str(start()))
        stats = store(f"redis://{HOST}:{port}").stats()
        assert stats is not None and stats.replica
