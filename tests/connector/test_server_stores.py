"""When LMCache's server says that stores have ended: its own storage manager, and a real Redis."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.storage_controllers import eviction_controller, store_controller
from lmcache.v1.distributed.storage_manager import StorageManager
from pdkit_connector import server_stores
from pdkit_connector.server_sockets import MEMORY, REDIS, serve, stored_by_server, stores_socket
from pdkit_connector.server_stores import NotedStores, answer_engines
from pdkit_connector.store_barrier import DEADLINE_ENV
from storage_tiers import Tiers, keys, kind, settings_file

CHUNKS = keys(6)
SOON_S, LONG_S = 0.2, 60.0


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Return the socket for requests of a server in this process, which answers engines."""
    controller = store_controller.StoreController
    for owner, name in (
        (store_controller, "StoreListener"),
        (controller, "__init__"),
        (controller, "_process_new_keys"),
        (StorageManager, "reserve_write"),
        (StorageManager, "finish_write_by_owner"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr(eviction_controller, "time", quick)
    monkeypatch.setenv(DEADLINE_ENV, str(LONG_S))
    path = str(tmp_path / "requests")
    answer_engines(path)
    return path


@pytest.fixture
def tiers(requests, server, tmp_path):
    running = Tiers(settings_file(tmp_path, server.url))
    yield running
    running.close()


def stored(requests, where, limit_s, answers=lambda: True):
    return asyncio.run(stored_by_server(requests, where, answers, limit_s))


def held(tiers, chunks):
    return len(tiers.second.held(chunks, {0: kind()}))


def test_kv_that_no_engine_can_read_yet_is_awaited(requests, tiers):
    assert stored(requests, MEMORY, LONG_S)
    tiers.manager.reserve_write(list(CHUNKS), kind())
    for where in (MEMORY, REDIS, MEMORY):
        assert not stored(requests, where, SOON_S)
    tiers.manager.finish_write(list(CHUNKS))
    assert stored(requests, MEMORY, LONG_S)
    assert stored(requests, REDIS, LONG_S)
    assert held(tiers, CHUNKS) == len(CHUNKS)


def test_redis_is_awaited_where_other_hosts_load_from_it(requests, server, tiers):
    server.stop_answering()
    tiers.store(CHUNKS)
    assert stored(requests, MEMORY, LONG_S), "engines of this host can load it"
    assert not stored(requests, REDIS, SOON_S)
    server.answer_again()
    assert stored(requests, REDIS, LONG_S)
    assert held(tiers, CHUNKS) == len(CHUNKS)


def test_all_of_it_is_in_redis_when_the_answer_comes(requests, tiers):
    for number in range(20):
        chunks = keys(4, model_name=f"models/{number}")
        tiers.store(chunks)
        assert stored(requests, REDIS, LONG_S)
        assert held(tiers, chunks) == len(chunks)


def test_the_stores_of_later_requests_are_not_awaited(requests, tiers, monkeypatch):
    holds, waits = server_stores._holds, threading.Event()
    monkeypatch.setattr(server_stores, "_holds", lambda *about: waits.set() or holds(*about))

    async def both():
        tiers.manager.reserve_write([CHUNKS[0]], kind())
        first = asyncio.create_task(stored_by_server(requests, MEMORY, lambda: True, LONG_S))
        assert await asyncio.to_thread(waits.wait, LONG_S)
        tiers.manager.reserve_write([CHUNKS[1]], kind())
        assert not first.done()
        tiers.manager.finish_write([CHUNKS[0]])
        return await first

    assert asyncio.run(both())
    tiers.manager.finish_write([CHUNKS[1]])


def test_what_is_being_loaded_from_redis_is_no_store(requests, tiers):
    places = tiers.manager._l1_manager
    taken = places.reserve_write(list(CHUNKS), [False] * len(CHUNKS), kind(), tag="a load")
    assert all(place is not None for _, place in taken.values())
    assert stored(requests, MEMORY, LONG_S)


def test_a_write_that_hangs_is_given_up_for_good_and_its_key_is_not():
    def ended(stores, whole_s):
        return asyncio.run(stores.wait(MEMORY, 0, whole_s))

    stores = NotedStores()
    stores.begin(CHUNKS)
    assert not ended(stores, LONG_S), "nor by one that has no time left"
    assert ended(stores, 0)
    assert ended(stores, LONG_S)
    stores.begin(CHUNKS[:1])
    assert not ended(stores, LONG_S)
    stores.end(CHUNKS[:1])
    assert ended(stores, LONG_S)


def test_what_redis_does_not_take_has_ended(requests, tiers, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(tiers.second, "submit_store_task", refuse)
    tiers.store(CHUNKS)
    assert stored(requests, REDIS, LONG_S)


def test_a_server_that_is_gone_has_no_stores(tmp_path):
    assert stored(str(tmp_path / "none"), REDIS, SOON_S)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(stores_socket(str(tmp_path / "ended")))
    assert stored(str(tmp_path / "ended"), REDIS, SOON_S)


@pytest.fixture
def hanging(tmp_path):
    """Return the socket for requests of a server that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(stores_socket(str(tmp_path / "hangs")))
        listening.listen()
        yield str(tmp_path / "hangs")


def test_a_server_that_hangs_is_late(hanging):
    assert not stored(hanging, MEMORY, SOON_S)


def test_a_server_that_answers_no_pings_is_not_awaited(hanging):
    began, looks = time.monotonic(), iter((True, True))
    assert stored(hanging, MEMORY, LONG_S, answers=lambda: next(looks, False))
    assert time.monotonic() - began < LONG_S / 2


def test_an_unknown_question_ends_the_connection_only(requests):
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(stores_socket(requests))
        asking.sendall(b"what?\n")
        assert asking.recv(1) == b""
    assert stored(requests, MEMORY, LONG_S)


def test_a_socket_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        serve(str(tmp_path / "nowhere" / "requests"), NotedStores().wait)
