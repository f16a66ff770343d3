"""Redis slow, full, restarting, read-only or gone: misses and skipped stores, in time, and back."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path import pool
from pdkit_connector.redis_path.pool import Attempts, Backoff
from pdkit_connector.redis_path.protocol import ReplyError
from redis_chunks import LIMITS as PATIENT
from redis_chunks import Pool, Storing, Warnings, client, loaded, prompt, stored
from redis_limits import BACK_S, LIMITS, SLACK_S, all_miss_in_time, unpaused, within, works
from redis_servers import eventually

from bench.redis_server import free_port
from tests.connector import fair_clock


def test_a_redis_that_stops_during_a_load_is_a_miss(server, make):
    one = make(server.url, replace(PATIENT, load_s=0.6))
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


def test_a_redis_that_stops_during_a_store_loses_chunks_only(server, make):
    one = make(server.url, replace(PATIENT, store_s=1.0))
    eventually(lambda: works(one, prompt("warm", 4)), 10)
    chunks = prompt("store", 100, 1 << 20)
    with within(1.0):
        kept = Storing(one, chunks, server.stop_answering).wait()
    assert 0 < len(kept) < 100
    with within(0):  # a pause, or a place in the queue
        late = Storing(one, prompt("late", 3))
    late.wait()
    server.answer_again()
    eventually(lambda: stored(one, prompt("again", 3)) == list(prompt("again", 3)), BACK_S)
    # What Redis was said to have, it has.
    eventually(lambda: one.lookups.held(kept) == len(kept), BACK_S)
    assert loaded(one, kept) == [chunks[key] for key in kept]


def test_a_redis_that_stops_before_a_lookup_is_a_miss(server, make):
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
    eventually(lambda: loaded(one, list(chunks)) == list(chunks.values()), BACK_S)


def test_a_redis_that_stops_for_long_is_used_again(server, make):
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
        began = fair_clock.now()
        one.lookups.held(keys)
        loaded(one, keys)
        took.append(fair_clock.now() - began)

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


def test_a_killed_redis_is_a_miss_and_used_again_after_its_restart(server, make):
    one = make(server.url)
    chunks = prompt("killed", 8)
    eventually(lambda: works(one, chunks), 10)
    server.kill()
    all_miss_in_time(one, chunks, rounds=2)
    assert one.counters.value("failures", kind="unreachable") > 0
    server.start()
    eventually(lambda: works(one, chunks), BACK_S)


def test_a_redis_restarted_between_requests_is_used_again(server, make):
    """Connections that died unused are made anew, without one miss."""
    one = make(server.url, PATIENT)
    chunks = prompt("unused", 8)
    assert works(one, chunks)
    server.kill()
    server.start()
    assert works(one, chunks)
    assert one.counters.value("failures") == 0


def test_connections_cut_under_load_are_replaced(server, make):
    one = make(server.url, PATIENT)
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


def test_a_full_redis_still_serves_reads(server, make):
    one = make(server.url, PATIENT)
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


def test_a_read_only_redis_still_serves_reads(server, make):
    one = make(server.url, PATIENT)
    chunks = prompt("replica", 8)
    assert works(one, chunks)
    server.admin.replicaof("127.0.0.1", free_port())
    assert stored(one, prompt("more", 2)) == []
    assert one.counters.value("failures", kind="readonly") > 0
    assert loaded(one, list(chunks)) == list(chunks.values())
    assert one.lookups.held(list(chunks)) == 8
    server.admin.replicaof("NO", "ONE")
    eventually(lambda: works(one, prompt("more", 2)), BACK_S)


def test_a_redis_that_loads_its_data_is_used_once_it_is_ready(server, make):
    chunks = prompt("loading", 1000)
    patient = make(server.url, PATIENT)
    assert works(patient, chunks)
    one = make(server.url)
    server.admin.save()
    server.kill()
    # 50 ms a key, until it is told otherwise: until then Redis answers that it is busy.
    server.start("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
    with within(LIMITS.lookup_s):
        assert one.lookups.held(list(chunks)) == 0
    with within(LIMITS.load_s):
        assert loaded(one, list(chunks)) == []
    with within(LIMITS.store_s):
        assert stored(one, prompt("more", 2)) == []
    assert one.counters.value("failures", kind="loading") > 0
    server.admin.config_set("key-load-delay", 0)
    eventually(lambda: not server.admin.info("persistence")["loading"], 20)
    eventually(lambda: loaded(patient, list(chunks)) == list(chunks.values()), BACK_S)
    eventually(lambda: works(one, prompt("more", 2)), BACK_S)


def test_a_silent_redis_is_left_before_the_limit(server, make):
    """Limits are as long as much KV takes; a Redis that says nothing is given up long before."""
    one = make(server.url, replace(PATIENT, load_s=600, store_s=600, silent_s=0.5))
    chunks = prompt("silent", 6, 1 << 20)
    eventually(lambda: works(one, chunks), 10)
    pool = Pool(lambda count: count == 3 and server.stop_answering())
    with within(0.5):
        assert len(one.loads.load(list(chunks), pool.allocate)) < 6
    unpaused(one)
    behind = prompt("behind", 40, 1 << 20)
    with within(0.5):
        assert stored(one, behind) == []
    unpaused(one)
    with within(0.5):  # a new connection that nobody accepts
        assert loaded(one, list(chunks)) == []
    server.answer_again()
    eventually(lambda: loaded(one, list(chunks)) == list(chunks.values()), BACK_S)


def test_nothing_starts_or_remains_after_close(server):
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


def test_pauses_after_failures_are_short_and_end_with_the_first_success(monkeypatch):
    at = 100.0
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: at))
    tried = Backoff("testing")

    def pause_s():
        """Fail, and return the pause, after which the next one begins."""
        nonlocal at
        tried.failed("kind", "why")
        began = at
        while tried.pausing():
            at += 0.01
        return at - began

    with Warnings() as told:
        assert [round(pause_s(), 1) for _ in range(10)] == [0.1, 0.2, 0.4, 0.8, *[1.0] * 6]
        tried.worked()
        assert not tried.pausing()
        assert round(pause_s(), 1) == 0.1
        assert len(told) == 1
        # What is new is told, whatever was told a moment ago.
        tried.failed("another kind", "why else")
        assert len(told) == 2


def test_a_server_that_invents_errors_does_not_fill_the_counters():
    """Each kind is kept, told and scraped: a server does not choose how many there are."""
    counters = Counters()
    tried = Attempts("testing", counters)

    def refused(word):
        raise ReplyError(f"{word} said")

    links = SimpleNamespace(changed=lambda: None)
    words = ["".join(chosen) for chosen in product("ABCDEFG", repeat=3)]
    with Warnings() as told:
        for word in (*words, "", "\x1b", "OOM"):
            tried.run(lambda word=word: refused(word), links)
        assert len(told) == 2
    kinds = {labels["kind"] for _, labels, _ in counters.all()}
    assert kinds == {"error", "oom"}
    assert counters.value("failures", kind="error") == len(words) + 2
