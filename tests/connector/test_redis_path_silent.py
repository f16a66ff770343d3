"""A Redis that is not there, never answers, or answers what no Redis says: misses, in time."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from pdkit_connector.redis_path.settings import Limits
from redis_chunks import prompt
from redis_limits import BACK_S, LIMITS, all_miss_in_time, within, works
from redis_servers import eventually

from bench.redis_server import free_port


def test_a_port_without_a_listener_is_a_miss_in_time(make):
    one = make(f"redis://127.0.0.1:{free_port()}")
    all_miss_in_time(one, prompt("refused", 4))
    assert one.counters.value("failures", kind="unreachable") > 0


@pytest.mark.parametrize("scheme", ["redis", "redis-cluster", "redis-sentinel"])
def test_a_server_that_never_answers_is_a_miss_in_time(make, scheme):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        path = "/main" if scheme == "redis-sentinel" else ""
        one = make(
            f"{scheme}://127.0.0.1:{port},127.0.0.1:{port}{path}"
            if path or "cluster" in scheme
            else f"{scheme}://127.0.0.1:{port}"
        )
        all_miss_in_time(one, prompt("silent", 4))
        with within(LIMITS.lookup_s + 2), pytest.raises(Exception, match=r"(?i)time"):
            one.lookups.ping()
        assert one.counters.value("failures", kind="timeout") > 0


def test_a_tls_handshake_that_never_ends_is_a_miss_in_time(make):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = make(f"rediss://127.0.0.1:{silent.getsockname()[1]}")
        all_miss_in_time(one, prompt("silent", 4))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-5\r\n",
        b"$99999999999999999999\r\n",
        b"$200\r\n" + bytes(200) + b"no end",
        b":-1\r\n",
        b"\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"-\xff\xfe what\r\n",
        b"x" * 200_000,
    ],
    ids=lambda answer: ascii(answer[:12])[2:-1],
)
def test_a_server_that_answers_nonsense_is_a_miss_in_time(make, answer):
    with Nonsense(answer) as server:
        all_miss_in_time(make(f"redis://127.0.0.1:{server.port}"), prompt("nonsense", 4))


def test_line_without_an_end_is_not_read_forever(make):
    with Nonsense(b"x" * 200_000) as server:
        one = make(f"redis://127.0.0.1:{server.port}", Limits(lookup_s=5))
        assert one.lookups.held([b"key"]) == 0
        assert one.counters.value("failures", kind="unreachable") == 1


def test_a_server_that_answers_byte_by_byte_is_a_miss_in_time(make):
    with Nonsense(b"+", then=b"x", every_s=0.05) as server:
        all_miss_in_time(make(f"redis://127.0.0.1:{server.port}"), prompt("drops", 4))


class Nonsense:
    """A server that is polite until it is logged in to, and then answers nonsense."""

    def __init__(self, answer, then=b"", every_s=0.0):
        self._answer = answer
        self._then = then
        self._every_s = every_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.close()

    def _accept(self):
        try:
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()
        except OSError:
            return

    def _serve(self, near):
        try:
            with near:
                while asked := near.recv(1 << 20):
                    polite = b"CLIENT" in asked
                    near.sendall(b"+OK\r\n" * asked.count(b"CLIENT") if polite else self._answer)
                    while self._then and not polite:
                        time.sleep(self._every_s)
                        near.sendall(self._then)
        except OSError:
            return


def test_a_slow_name_lookup_is_a_miss_in_time(server, make, monkeypatch):
    real, slow = socket.getaddrinfo, threading.Event()

    def hanging(*arguments, **options):
        slow.wait(20)
        return real(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    one = make(f"redis://localhost:{server.port}")
    chunks = prompt("name", 4)
    all_miss_in_time(one, chunks)
    # Nobody asks for the name again while it is being looked up: two lanes each way, and lookups.
    asking = [t for t in threading.enumerate() if t.name == "pdkit-redis-connect" and t.is_alive()]
    assert 0 < len(asking) <= 5
    slow.set()
    eventually(lambda: works(one, chunks), BACK_S)
    assert one.counters.value("connects") <= 10, "and not one for each time that it was missed"
