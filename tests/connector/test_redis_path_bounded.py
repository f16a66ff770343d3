"""Redis slow, full, restarting, read-only or gone: misses and skipped stores, in time, and back."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import pytest
from pdkit_connector.redis_path.client import Limits
from pdkit_connector.redis_path.health import Health
from redis_chunks import Pool, Storing, Warnings, client, loaded, prompt, stored
from redis_servers import eventually, free_port

LIMITS = Limits(lookup_s=0.2, load_s=0.4, store_s=0.4)
SLACK_S = 0.5
BACK_S = 2.0


@pytest.fixture
def make(request):
    """Return `client`, with everything it makes closed after the test."""

    def made(url, limits=LIMITS):
        one = client(url, limits)
        request.addfinalizer(one.close)
        return one

    return made


@contextmanager
def within(seconds):
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + SLACK_S, f"{took:.2f} s"


def works(one, chunks):
    """Tell whether chunks can be stored, found and loaded."""
    keys = list(chunks)
    return (
        stored(one, chunks) == keys
        and one.lookups.held(keys) == len(keys)
        and loaded(one, keys) == list(chunks.values())
    )


def all_miss_in_time(one, chunks, rounds=1):
    """Use a Redis that does not work in every way: nothing comes, nothing raises, nobody waits."""
    keys = list(chunks)
    for _ in range(rounds):
        unpaused(one)
        with within(LIMITS.lookup_s):
            assert one.lookups.held(keys) == 0
        unpaused(one)
        with within(LIMITS.lookup_s):
            assert one.lookups.remove(keys) <= 0
        unpaused(one)
        with within(LIMITS.load_s):
            assert loaded(one, keys) == []
        with within(LIMITS.store_s):
            assert stored(one, chunks) == []


def unpaused(one):
    for part in (one.loads, one.stores):
        eventually(lambda part=part: not part._attempts.pausing(), 1.0)


def test_stopped_in_the_middle_of_a_load(server, make):
    one = make(server.url, Limits(load_s=0.6))
    chunks = prompt("load", 60, 1 << 18)
    keys, payloads = list(chunks), list(chunks.values())
    assert stored(one, chunks) == keys
    pool = Pool(lambda count: count == 5 and server.stop_answering())
    with within(0.6):
        found = one.loads.load(keys, pool.allocate)
    assert [bytes(memory.data) for memory in found] == payloads[: len(found)]
    assert len(found) < 60
    eventually(lambda: pool.balanced(found), 1)
    assert one.counters.value("failures", kind="timeout") > 0
    server.answer_again()
    eventually(lambda: loaded(one, keys) == payloads, BACK_S)


def test_stopped_in_the_middle_of_a_store(server, make):
    one = make(server.url, Limits(store_s=1.0))
    eventually(lambda: works(one, prompt("warm", 4)), 10)
    chunks = prompt("store", 100, 1 << 20)
    storing = Storing(one, chunks)
    storing.wait_for_one()
    server.stop_answering()
    with within(1.0):
        kept = storing.wait()
    assert 0 < len(kept) < 100
    with within(0):  # a pause, or a place in the queue
        late = Storing(one, prompt("late", 3))
    late.wait()
    server.answer_again()
    eventually(lambda: stored(one, prompt("again", 3)) == list(prompt("again", 3)), BACK_S)
    # What Redis was said to have, it has.
    eventually(lambda: one.lookups.held(kept) == len(kept), BACK_S)
    assert loaded(one, kept) == [chunks[key] for key in kept]


def test_stopped_before_a_lookup(server, make):
    one = make(server.url)
    chunks = prompt("lookup", 4)
    eventually(lambda: works(one, chunks), 10)
    server.stop_answering()
    with within(LIMITS.lookup_s):
        assert one.lookups.held(list(chunks)) == 0
    with within(0):
        assert one.lookups.held(list(chunks)) == 0  # not asked at all
    server.answer_again()
    eventually(lambda: one.lookups.held(list(chunks)) == 4, BACK_S)
    assert loaded(one, list(chunks)) == list(chunks.values())


def test_stopped_for_all_and_for_long(server, make):
    one = make(server.url)
    chunks = prompt("all", 8)
    eventually(lambda: works(one, chunks), 10)
    server.stop_answering()
    all_miss_in_time(one, chunks, rounds=2)
    server.answer_again()
    eventually(lambda: works(one, chunks), BACK_S)


def test_many_callers_wait_no_longer_than_one(server, make):
    one = make(server.url)
    chunks = prompt("many", 4)
    eventually(lambda: works(one, chunks), 10)
    server.stop_answering()
    keys, took = list(chunks), []

    def ask():
        began = time.monotonic()
        one.lookups.held(keys)
        loaded(one, keys)
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 8
    assert max(took) < LIMITS.lookup_s + LIMITS.load_s + SLACK_S
    server.answer_again()
    eventually(lambda: works(one, chunks), BACK_S)


def test_lookup_waits_for_its_turn_no_longer_than_its_limit(server, make):
    one = make(server.url)
    one.lookups.ping()
    server.stop_answering()
    ended = []

    def ping():
        one.lookups.ping()
        ended.append(True)

    thread = threading.Thread(target=ping)
    thread.start()
    eventually(one.lookups._lock.locked, 1)
    with within(LIMITS.lookup_s):
        assert one.lookups.held([b"key"]) == 0
    assert not ended
    server.answer_again()
    thread.join()


def test_killed_and_restarted(server, make):
    one = make(server.url)
    chunks = prompt("killed", 8)
    eventually(lambda: works(one, chunks), 10)
    server.kill()
    all_miss_in_time(one, chunks, rounds=2)
    assert one.counters.value("failures", kind="unreachable") > 0
    server.start()
    eventually(lambda: works(one, chunks), BACK_S)


def test_restarted_while_nobody_asked(server, make):
    """Connections that died unused are made anew, without one miss."""
    one = make(server.url, Limits())
    chunks = prompt("unused", 8)
    assert works(one, chunks)
    server.kill()
    server.start()
    assert works(one, chunks)
    assert one.counters.value("failures") == 0


def test_connections_that_are_cut_under_load(server, make):
    one = make(server.url, Limits())
    chunks = prompt("cut", 64, 1 << 18)
    keys, payloads = list(chunks), list(chunks.values())
    assert stored(one, chunks) == keys
    ended = threading.Event()

    def cut():
        while not ended.wait(0.01):
            server.admin.client_kill_filter(_type="normal", skipme=True)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(30):
            found = loaded(one, keys)  # checks that all memory is back
            assert found == payloads[: len(found)]
            Storing(one, chunks).wait()
    finally:
        ended.set()
        thread.join()
    eventually(lambda: loaded(one, keys) == payloads, BACK_S)


def test_full(server, make):
    one = make(server.url, Limits())
    chunks = prompt("full", 8)
    assert works(one, chunks)
    server.admin.config_set("maxmemory", 1)  # less than an empty Redis of any release takes
    with Warnings() as told:
        for _ in range(5):
            assert stored(one, prompt("more", 2)) == []
            assert loaded(one, list(chunks)) == list(chunks.values())
            assert one.lookups.held(list(chunks)) == 8
            time.sleep(0.15)
    assert len(told) == 1
    assert "OOM" in told[0]
    assert one.counters.value("failures", kind="oom") > 0
    assert one.counters.value("chunks", operation="store", result="failed") > 0
    assert one.counters.value("chunks", operation="load", result="paused") == 0
    server.admin.config_set("maxmemory", 0)
    eventually(lambda: works(one, prompt("more", 2)), BACK_S)


def test_read_only(server, make):
    one = make(server.url, Limits())
    chunks = prompt("replica", 8)
    assert works(one, chunks)
    server.admin.replicaof("127.0.0.1", free_port())
    assert stored(one, prompt("more", 2)) == []
    assert one.counters.value("failures", kind="readonly") > 0
    assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.lookups.held(list(chunks)) == 8
    server.admin.replicaof("NO", "ONE")
    eventually(lambda: works(one, prompt("more", 2)), BACK_S)


def test_loading(server, make):
    one = make(server.url)
    chunks = prompt("loading", 40)
    eventually(lambda: works(one, chunks), 10)
    server.admin.save()
    server.kill()
    # 50 ms a key: two seconds, in which Redis answers that it is busy.
    server.start("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
    with within(LIMITS.lookup_s):
        assert one.lookups.held(list(chunks)) == 0
    with within(LIMITS.load_s):
        assert loaded(one, list(chunks)) == []
    with within(LIMITS.store_s):
        assert stored(one, prompt("more", 2)) == []
    assert one.counters.value("failures", kind="loading") > 0
    eventually(lambda: not server.admin.info("persistence")["loading"], 20)
    eventually(lambda: loaded(one, list(chunks)) == list(chunks.values()), BACK_S)
    eventually(lambda: works(one, prompt("more", 2)), BACK_S)


def test_queued_bytes_are_capped(server, make):
    one = make(server.url, Limits(store_s=0.6, queued_bytes=3 << 20))
    assert stored(one, prompt("first", 1)) == list(prompt("first", 1))
    server.stop_answering()
    storing = Storing(one, prompt("queue", 10, 1 << 20))
    assert sum(storing.begun.values()) == 3
    assert one.counters.value("chunks", operation="store", result="no_room") == 7
    with within(LIMITS.store_s):
        assert storing.wait() == []
    server.answer_again()
    # The room is given back; and a value that is larger than all of it is let in alone.
    eventually(lambda: stored(one, prompt("large", 1, 4 << 20)), BACK_S)
    again = prompt("again", 3, 1 << 20)
    assert stored(one, again) == list(again)


def test_nothing_listens(make):
    one = make(f"redis://127.0.0.1:{free_port()}")
    all_miss_in_time(one, prompt("refused", 4))
    assert one.counters.value("failures", kind="unreachable") > 0


@pytest.mark.parametrize("scheme", ["redis", "redis-cluster", "redis-sentinel"])
def test_server_that_never_answers(make, scheme):
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


def test_tls_handshake_that_never_ends(make):
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
def test_server_that_answers_nonsense(make, answer):
    with Nonsense(answer) as server:
        all_miss_in_time(make(f"redis://127.0.0.1:{server.port}"), prompt("nonsense", 4))


def test_line_without_an_end_is_not_read_for_ever(make):
    with Nonsense(b"x" * 200_000) as server:
        one = make(f"redis://127.0.0.1:{server.port}", Limits(lookup_s=5))
        assert one.lookups.held([b"key"]) == 0
        assert one.counters.value("failures", kind="unreachable") == 1


def test_server_that_answers_drop_by_drop(make):
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


def test_name_that_takes_long_to_look_up(server, make, monkeypatch):
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
    assert one.counters.value("connects") <= 5


def test_after_close_nothing_is_begun_or_left_behind(server):
    one = client(server.url)
    chunks = prompt("closed", 50, 1 << 18)
    storing = Storing(one, chunks)
    one.close()
    assert storing.wait(0.1) == list(chunks)  # what was begun was finished
    assert stored(one, prompt("more", 2)) == []
    with within(0):
        assert loaded(one, list(chunks)) == []
    eventually(lambda: len(server.admin.client_list(_type="normal")) == 1, 2)


def test_close_does_not_wait_for_a_redis_that_hangs(server):
    one = client(server.url, LIMITS)
    eventually(lambda: works(one, prompt("hang", 4)), 10)
    server.stop_answering()
    storing = Storing(one, prompt("more", 4, 1 << 20))
    with within(LIMITS.store_s + LIMITS.load_s):
        one.close()
    storing.wait(1)
    server.answer_again()


def test_pauses_are_short_and_end_with_the_first_success():
    health = Health("testing")
    with Warnings() as told:
        for _ in range(10):
            health._until = 0.0  # as if the pause were over
            health.failed("kind", "why")
            assert health.pausing()
            assert health._until - time.monotonic() <= 1.0
        health.worked()
        assert not health.pausing()
        health.failed("kind", "why, again")
        assert health._until - time.monotonic() <= 0.11
        assert len(told) == 1
        # What is new is told, whatever was told a moment ago.
        health.failed("another kind", "why else")
        assert len(told) == 2
