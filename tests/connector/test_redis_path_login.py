"""A server that is hostile, or broken, while an engine logs in or asks who has which keys."""

from __future__ import annotations

import pytest
from pdkit_connector.redis_path import servers
from pdkit_connector.redis_path.servers import Cluster, Single, _by_slot, parse
from redis.exceptions import RedisError

from tests.hostile_redis import dripping, endless, hostile

ASKED = ("asked", 1)
# What a socket holds beside what was read from it.
BUFFERS = 16 << 20


@pytest.mark.parametrize(
    "announced",
    [b"$99000000000\r\n", b"*2000000000\r\n$99000000000\r\n", b"+", b"-ERR "],
    ids=["bulk", "array", "line", "error"],
)
def test_an_endless_answer_to_the_login_is_cut_off(announced):
    with hostile(endless(announced)) as server:
        with pytest.raises((RedisError, OSError)):
            Single(parse(server.url)).connect(servers.ONLY)
        assert server.sent_bytes < servers.REPLY_BYTES + BUFFERS


def test_nested_arrays_in_the_answer_are_refused():
    nested = b"*1\r\n" * 100_000
    with (
        hostile(lambda server, taker: server.send(taker, nested)) as server,
        pytest.raises((RedisError, OSError, RecursionError)),
    ):
        Single(parse(server.url)).connect(servers.ONLY)


def test_a_login_that_answers_byte_by_byte_ends_in_time(monkeypatch):
    """Every byte comes in time, and all of them do not."""
    monkeypatch.setattr(servers, "LOGIN_S", 0.5)
    with hostile(dripping(0.02, 1000)) as server:
        with pytest.raises((RedisError, OSError), match=r"(?i)time|deadline"):
            Single(parse(server.url)).connect(servers.ONLY)
        assert server.sent_bytes < 1000


def test_a_server_is_asked_within_its_time_after_the_login(monkeypatch):
    monkeypatch.setattr(servers, "LOGIN_S", 0.5)

    def answer(server, taker):
        server.send(taker, b"+OK\r\n")
        taker.recv(4096)
        dripping(0.02, 1000)(server, taker)

    with hostile(answer) as server:
        cluster = Cluster(parse(server.url.replace("redis://", "redis-cluster://")))
        with pytest.raises((RedisError, OSError)):
            cluster.learn()
        assert server.sent_bytes < 1000


def test_many_servers_are_asked_no_longer_than_one_limit(monkeypatch):
    monkeypatch.setattr(servers, "_ASK_S", -1)
    nodes = tuple(("127.0.0.1", port) for port in range(1, 1000))
    with pytest.raises(OSError, match="no server"):
        servers._ask(parse("redis://127.0.0.1:1"), nodes, ("PING",), lambda said, _node: said)


NODE = [b"10.0.0.1", 6379, b"id"]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([[0, 200_000_000, NODE]], "slots 0 to 200000000"),
        ([[-5, 16383, NODE]], "slots -5 to"),
        ([[9, 3, NODE]], "slots 9 to 3"),
        ([[0, 16383, NODE]] * 2, "twice"),
        ([[0, 16383, [b"h", 0, b"id"]]], "0 is not a port"),
        ([[0, 16383, [b"h", 1 << 40, b"id"]]], "not a port"),
        ([[0, 16000, NODE]], "16001 of 16384"),
    ],
)
def test_slot_tables_that_no_cluster_has_are_refused(ranges, words):
    with pytest.raises(ConnectionError, match=words):
        _by_slot(ranges, ASKED)


def test_the_slot_table_of_a_cluster_is_read():
    nodes = _by_slot([[0, 8191, NODE], [8192, 16383, [b"", 7, b"id"]]], ASKED)
    assert nodes[:8192] == [("10.0.0.1", 6379)] * 8192
    assert nodes[8192:] == [("asked", 7)] * 8192
