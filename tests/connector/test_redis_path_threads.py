"""Many threads of one engine, and several engines, on one Redis at once."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest
from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.pool import Lanes
from pdkit_connector.redis_path.settings import Limits
from redis_chunks import client, loaded, prompt, stored
from redis_servers import Servers

THREADS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("redis")) as servers:
        yield servers.start()


def in_threads(work):
    """Run `work(number)` in each thread; raise what the first raised."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_may_store_load_and_look_up_at_once(server):
    limits = Limits(lookup_s=10, load_s=20, store_s=20)
    engines = [client(server.url, limits) for _ in range(2)]

    def work(number):
        rng = random.Random(number)
        for round_ in range(6):
            mine, others = rng.sample(engines, 2)
            chunks = prompt(f"{number}:{round_}", rng.randrange(1, 12), rng.randrange(1, 1 << 19))
            keys = list(chunks)
            assert stored(mine, chunks) == keys
            assert others.lookups.held([*keys, b"absent"]) == len(keys)
            assert loaded(others, [*keys, b"absent"]) == list(chunks.values())
            hole = rng.randrange(len(keys))
            others.lookups.remove(keys[hole : hole + 1])
            assert loaded(mine, keys) == list(chunks.values())[:hole]

    in_threads(work)
    for one in engines:
        assert one.counters.value("failures") == 0
        one.close()


def test_threads_may_use_the_same_keys(server):
    """Whoever stores last, each value that is read is a whole one."""
    one = client(server.url, Limits(lookup_s=10, load_s=20, store_s=20))
    chunks = prompt("same", 8, 1 << 17)
    keys, payloads = list(chunks), list(chunks.values())

    def work(number):
        for _ in range(10):
            if number % 2:
                assert stored(one, chunks) == keys
            else:
                got = loaded(one, keys)
                assert got == payloads[: len(got)]

    in_threads(work)
    assert loaded(one, keys) == payloads
    one.close()


def test_cpu_time_is_counted_and_waiting_is_not():
    def compute(_links):
        ends = time.thread_time() + 0.05
        while time.thread_time() < ends:
            pass
        raise ValueError("what fails has used its time, too")

    counters = Counters()
    lanes = Lanes("load", 2, lambda: SimpleNamespace(close=bool), counters)
    lanes.submit(lambda _links: time.sleep(0.5))
    for _ in range(2):
        lanes.submit(compute)
    lanes.close(60)
    assert 0.1 <= counters.value("cpu_seconds", operation="load") < 0.4
    assert counters.value("cpu_seconds", operation="store") == 0


@pytest.mark.parametrize("count", [1, 2])
def test_cpu_time_of_all_shards_is_counted_by_operation(servers, count):
    one = client([servers.start().url for _ in range(count)])
    chunks = prompt("used", 8, 1 << 20)
    before = time.process_time()
    stored(one, chunks)
    assert loaded(one, list(chunks)) == list(chunks.values())
    one.close()
    used = [one.counters.value("cpu_seconds", operation=what) for what in ("store", "load")]
    assert min(used) > 0
    assert sum(used) <= time.process_time() - before
