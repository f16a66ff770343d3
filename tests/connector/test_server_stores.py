"""When LMCache's server says that stores have ended: its own storage manager, and a real Redis."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.storage_controllers import eviction_controller, store_controller
from pdkit_connector.server_stores import answer_engines
from pdkit_connector.stores_socket import MEMORY, REDIS, stored_by_server, stores_socket
from storage_tiers import Tiers, keys, kind, settings_file

CHUNKS = keys(6)
SOON_S, LONG_S = 0.2, 60.0


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Return the socket for requests of a server in this process, which answers engines."""
    for owner, name in (
        (store_controller, "StoreListener"),
        (store_controller.StoreController, "__init__"),
        (store_controller.StoreController, "_process_new_keys"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr(eviction_controller, "time", quick)
    path = str(tmp_path / "requests")
    answer_engines(path)
    return path


@pytest.fixture
def tiers(requests, server, tmp_path):
    running = Tiers(settings_file(tmp_path, server.url))
    yield running
    running.close()


def stored(requests, where, limit_s):
    return asyncio.run(stored_by_server(requests, where, limit_s))


def test_kv_that_no_engine_can_read_yet_is_awaited(requests, tiers):
    assert stored(requests, MEMORY, LONG_S)
    tiers.manager.reserve_write(list(CHUNKS), kind())
    assert not stored(requests, MEMORY, SOON_S)
    assert not stored(requests, REDIS, SOON_S)
    assert stored(requests, MEMORY, SOON_S), "a store that hangs holds one answer up, not all"
    tiers.manager.finish_write(list(CHUNKS))
    assert stored(requests, MEMORY, LONG_S)
    assert stored(requests, REDIS, LONG_S)


def test_redis_is_awaited_where_other_hosts_load_from_it(requests, server, tiers):
    server.stop_answering()
    tiers.store(CHUNKS)
    assert stored(requests, MEMORY, LONG_S), "engines of this host can load it"
    assert not stored(requests, REDIS, SOON_S)
    server.answer_again()
    tiers.stored(keys(9)[6:])
    assert stored(requests, REDIS, LONG_S)
    assert len(tiers.second.held(CHUNKS, {0: kind()})) == len(CHUNKS)


def test_all_of_it_is_in_redis_when_the_answer_comes(requests, tiers):
    for round_ in range(20):
        chunks = keys(4, model_name=f"models/{round_}")
        tiers.store(chunks)
        assert stored(requests, REDIS, LONG_S)
        assert len(tiers.second.held(chunks, {0: kind()})) == len(chunks)


def test_the_stores_of_later_requests_are_not_awaited(requests, tiers):
    async def both():
        tiers.manager.reserve_write([CHUNKS[0]], kind())
        first = asyncio.create_task(stored_by_server(requests, MEMORY, LONG_S))
        await asyncio.sleep(SOON_S)
        tiers.manager.reserve_write([CHUNKS[1]], kind())
        assert not first.done()
        tiers.manager.finish_write([CHUNKS[0]])
        return await first

    assert asyncio.run(both())
    tiers.manager.finish_write([CHUNKS[1]])


def test_what_is_loaded_or_given_up_is_no_store(requests, tiers, monkeypatch):
    tiers.stored(CHUNKS)
    assert tiers.manager.delete_l1_keys(list(CHUNKS)) is not None
    assert tiers.found(CHUNKS) == (0, len(CHUNKS))
    assert stored(requests, MEMORY, LONG_S)
    tiers.read()
    (listener,) = {one._listener for one in tiers.manager._store_controllers.values()}
    listener.on_l1_keys_reserved_write(["never written"])
    assert not stored(requests, MEMORY, SOON_S)
    listener.on_l1_keys_deleted_by_manager(["never written"])
    assert listener.being_written() == set()


def test_what_redis_refuses_has_ended(requests, tiers, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(tiers.second, "submit_store_task", refuse)
    tiers.store(CHUNKS)
    assert stored(requests, REDIS, LONG_S)


def test_a_server_that_is_gone_has_no_stores(tmp_path):
    assert stored(str(tmp_path / "none"), REDIS, SOON_S)


def test_a_server_that_hangs_is_late(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(stores_socket(str(tmp_path / "hangs")))
        listening.listen()
        assert not stored(str(tmp_path / "hangs"), MEMORY, SOON_S)
