"""What an engine tells of Redis itself: memory, evictions, traffic, and whether it answers."""

from __future__ import annotations

import json
import threading

import pytest
from pdkit_connector.redis_path import info as module
from pdkit_connector.redis_path.info import Servers, families
from redis_chunks import LIMITS, client, prompt, stored
from redis_servers import eventually


@pytest.fixture
def watched(monkeypatch):
    """Return a function that watches servers, and returns what is told of them."""
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    monkeypatch.setattr(module, "_LIMIT_S", 20)
    made = []

    def watch(*all_servers):
        made.append(client([server.url for server in all_servers], LIMITS))
        told = Servers()
        told.watch(made[-1].shards)
        return told, made[-1]

    yield watch
    for one in made:
        one.close()


def read(told):
    return json.loads(told.dump())


def metrics(told):
    return {
        (sample.name, sample.labels["shard"]): sample.value
        for family in families(told.dump())
        for sample in family.samples
    }


def test_a_page_waits_for_no_reading(watched, server, monkeypatch):
    let_read = threading.Event()
    real = module._reading
    monkeypatch.setattr(module, "_reading", lambda links: let_read.wait(60) and real(links))
    told, _ = watched(server)
    assert read(told) == {}
    let_read.set()
    eventually(lambda: read(told), 10)


def test_memory_evictions_and_traffic_are_reported(watched, servers):
    server = servers.start("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    told, writer = watched(server)
    eventually(lambda: read(told), 10)
    assert metrics(told)["pdkit_redis_evicted_keys_total", "0"] == 0
    stored(writer, prompt("chunk", 900))

    def evicted():
        return server.admin.info("stats")["evicted_keys"]

    eventually(lambda: 0 < evicted() == metrics(told)["pdkit_redis_evicted_keys_total", "0"], 10)
    found = metrics(told)
    assert found["pdkit_redis_max_memory_bytes", "0"] == 3 * 2**20
    assert 2**20 < found["pdkit_redis_used_memory_bytes", "0"] < 4 * 2**20
    assert found["pdkit_redis_received_bytes_total", "0"] > 3 * 2**20
    assert found["pdkit_redis_clients", "0"] >= 2
    assert found["pdkit_redis_up", "0"] == 1


def test_a_shard_that_is_gone_is_down_until_it_is_back(watched, servers):
    first, second = servers.start(), servers.start()
    told, _ = watched(first, second)
    eventually(lambda: read(told).get("1", {}).get("up"), 10)
    second.kill()
    eventually(lambda: read(told)["1"] == {"up": 0}, 10)
    assert read(told)["0"]["up"] == 1
    second.start()
    eventually(lambda: read(told)["1"].get("used_memory"), 10)


def test_a_redis_that_hangs_holds_up_no_page(watched, server, monkeypatch):
    monkeypatch.setattr(module, "_LIMIT_S", 0.5)  # also of the reading under way when it stops
    told, _ = watched(server)
    eventually(lambda: read(told).get("0", {}).get("up"), 10)
    server.stop_answering()
    eventually(lambda: read(told)["0"] == {"up": 0}, 10)
    server.answer_again()
    eventually(lambda: read(told)["0"].get("up"), 10)


def test_a_user_without_info_rights_sees_only_that_redis_answers(watched, server):
    told, _ = watched(server)
    server.admin.execute_command("ACL", "SETUSER", "default", "-info")
    eventually(lambda: read(told), 10)
    assert read(told)["0"] == {"up": 1}
    assert metrics(told) == {("pdkit_redis_up", "0"): 1}


def test_nothing_is_reported_without_a_store():
    assert metrics(Servers()) == {}
    assert list(families(b"{}")) == []
