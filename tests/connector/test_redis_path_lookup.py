"""What Redis has: asked for all chunks of a prompt at once."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
from pdkit_connector.redis_path.value import HEADER_BYTES
from redis_chunks import LIMITS, client, prompt, stored
from redis_servers import Servers, eventually

from bench.redis_server import free_port

SIZE = HEADER_BYTES + 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("redis")) as servers:
        yield servers.start()


@pytest.fixture
def one(server):
    server.admin.flushall()
    made = client(server.url)
    yield made
    made.close()


class HoldsBack:
    """A relay to Redis that passes nothing on before a number of commands have come."""

    def __init__(self, port: int) -> None:
        self._commands, self._name = 0, b""
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def until(self, commands: int, name: bytes) -> None:
        self._commands, self._name = commands, name

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(("127.0.0.1", self._to)) as far:
            answers = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            answers.start()
            held = b""
            while asked := near.recv(1 << 20):
                held += asked
                if held.count(self._name) >= self._commands:
                    far.sendall(held)
                    held = b""
            far.shutdown(socket.SHUT_RDWR)
            answers.join()

    @staticmethod
    def _pass_on(far: socket.socket, near: socket.socket) -> None:
        while answers := far.recv(1 << 20):
            near.sendall(answers)

    def close(self) -> None:
        self._listener.close()


def test_a_lookup_counts_chunks_from_the_first_on(server, one):
    keys = list(prompt("a", 10))
    assert one.lookups.held(keys) == 0
    stored(one, prompt("a", 10))
    assert one.lookups.held(keys) == one.lookups.held(keys, SIZE) == 10
    assert one.lookups.held([*keys, b"absent"]) == 10
    server.admin.delete(keys[6])
    assert one.lookups.held(keys, SIZE) == 6
    server.admin.delete(keys[0])
    assert one.lookups.held(keys, SIZE) == 0
    assert one.lookups.held(keys[1:], SIZE) == 5
    assert one.lookups.held([]) == 0
    assert one.counters.value("chunks", operation="lookup", result="hit") == 10 * 3 + 6 + 5


def test_value_of_another_length_is_not_found(server, one):
    keys = list(prompt("b", 4))
    stored(one, prompt("b", 4))
    assert one.lookups.held(keys, SIZE - 1) == 0
    server.admin.append(keys[2], b"x")
    assert one.lookups.held(keys, SIZE) == 2
    assert one.lookups.held(keys) == 4
    server.admin.set(keys[1], b"shorter than a header")
    assert one.lookups.held(keys) == 1


def test_value_of_another_type_is_a_miss_and_not_a_failure(server, one):
    keys = list(prompt("c", 4))
    stored(one, prompt("c", 4))
    server.admin.delete(keys[2])
    server.admin.lpush(keys[2], b"x")
    assert one.lookups.held(keys) == 2
    assert one.lookups.held(keys[:2]) == 2  # at once, with no pause
    assert one.counters.value("failures") == 0


@pytest.mark.parametrize(("commands", "found"), [(1000, 1000), (1001, 0)])
def test_thousand_keys_in_one_round_trip(server, one, commands, found):
    """All are asked for before the first is answered; were one more awaited, none would be."""
    chunks = prompt("d", 1000, 16)
    stored(one, chunks)
    relay = HoldsBack(server.port)
    limit_s = LIMITS.lookup_s if found else 0.5
    held_back = client(f"redis://127.0.0.1:{relay.port}", replace(LIMITS, lookup_s=limit_s))
    eventually(lambda: held_back.counters.value("connects") or held_back.lookups.held([b"x"]), 20)
    calls = server.admin.info("commandstats")["cmdstat_strlen"]["calls"]
    relay.until(commands, b"STRLEN")
    assert held_back.lookups.held(list(chunks)) == found
    assert server.admin.info("commandstats")["cmdstat_strlen"]["calls"] == calls + found
    held_back.close()
    relay.close()


def test_thousand_keys_take_milliseconds(server, one):
    """Less than redis-py's own pipeline takes on the same machine."""
    keys = list(prompt("e", 1000, 16))
    stored(one, prompt("e", 1000, 16))

    def pipelined():
        with server.admin.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
            return sum(map(bool, pipeline.execute()))

    ours, plain = [], []
    for _ in range(20):
        for times, ask in ((ours, lambda: one.lookups.held(keys)), (plain, pipelined)):
            began = time.perf_counter()
            assert ask() == 1000
            times.append(time.perf_counter() - began)
    assert min(ours) < min(plain), (ours, plain)


def test_a_lookup_counts_as_use_for_eviction(server, one):
    server.admin.config_set("maxmemory-policy", "allkeys-lfu")
    server.admin.config_set("lfu-log-factor", 0)  # each use is counted
    server.admin.config_set("lfu-decay-time", 0)  # and none is forgotten when a minute begins
    stored(one, prompt("f", 1))
    (key,) = prompt("f", 1)
    before = server.admin.object("freq", key)
    for _ in range(5):
        assert one.lookups.held([key]) == 1
    assert server.admin.object("freq", key) == before + 5


def test_removed_keys_are_counted_and_gone(server, one):
    keys = list(prompt("g", 5))
    stored(one, prompt("g", 5))
    assert one.lookups.remove([*keys[:2], b"absent"]) == 2
    assert server.admin.exists(*keys) == 3
    assert one.lookups.held(keys[2:]) == 3


def test_a_ping_fails_if_nothing_listens(server, one):
    one.lookups.ping()
    gone = client(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(Exception, match="refused"):
        gone.lookups.ping()
    gone.close()
