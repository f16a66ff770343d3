"""The start of an engine: its connections are there before there is something to store."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pdkit_connector.counters import COUNTERS, Counters
from pdkit_connector.redis_path.backend import RedisPath
from pdkit_connector.redis_path.pool import Links
from pdkit_connector.redis_path.protocol import Deadline
from pdkit_connector.redis_path.settings import Limits
from redis_backend import loaded, made, stored
from redis_chunks import Storing, Warnings, prompt
from redis_chunks import loaded as chunks_loaded
from redis_chunks import stored as chunks_stored
from redis_limits import BACK_S, works
from redis_servers import eventually

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import key, metadata, redis_path_config

LIMITS = Limits(lookup_s=20, load_s=30, store_s=30)
CHUNKS = prompt("start", 8)
KEYS = list(CHUNKS)


class Names:
    """A DNS server that knows `localhost`, and may take its time.

    Attributes:
        asked: one for each question.
        answers: while this is not set, nobody gets an answer.
    """

    def __init__(self, monkeypatch) -> None:
        self.asked: list[bool] = []
        self.answers = threading.Event()
        self.answers.set()
        self._find = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host, *arguments, **options):
        if host == "localhost":
            self.asked.append(True)
            self.answers.wait(60)
        return self._find(host, *arguments, **options)


@pytest.fixture
def names(monkeypatch):
    made = Names(monkeypatch)
    yield made
    made.answers.set()


def by_name(server) -> str:
    return f"redis://localhost:{server.port}"


def connected() -> bool:
    """Tell whether nobody is connecting any more, well or not."""
    return all(thread.name != "pdkit-redis-connect" for thread in threading.enumerate())


def clients(server) -> int:
    """Return how many connections Redis has, without that of the test."""
    return len(server.admin.client_list(_type="normal")) - 1


def test_no_name_is_looked_up_after_the_start(server, names, request):
    failures = COUNTERS.value("failures")
    backend = made(redis_path_config(by_name(server)))
    request.addfinalizer(backend.close)
    eventually(connected, 20)
    names.answers.clear()
    keys = [key(number) for number in (1, 2, 3)]
    stored(backend, 1, 2, 3)
    assert backend.batched_contains(keys) == 3
    assert loaded(backend.batched_get_blocking(keys)) == [1, 2, 3]
    assert COUNTERS.value("failures") == failures


def test_the_first_store_waits_for_a_name_that_is_slow(server, names, make):
    """All of it is stored when the answer comes, and nobody asks for the name again."""
    names.answers.clear()
    one = make(by_name(server))
    one.open()
    eventually(lambda: len(names.asked) == 4, 20)  # two lanes each way, before there is a store
    storing = Storing(one, CHUNKS)
    names.answers.set()
    assert storing.wait() == KEYS
    assert chunks_loaded(one, KEYS) == list(CHUNKS.values())
    assert len(names.asked) == one.counters.value("connects") == 4
    assert one.counters.value("failures") == 0


def test_a_redis_that_is_down_at_the_start_is_used_later(server, make):
    """It costs nothing before it is needed, then what it costs at any time; and it may come."""
    server.kill()
    one = make(server.url)
    with Warnings() as told:
        one.open()
        eventually(connected, 20)
        assert (told, one.counters.value("failures")) == ([], 0)
        assert chunks_stored(one, CHUNKS) == []
        assert len(told) == 1
    counted = [one.counters.value("chunks", result=result) for result in ("failed", "paused")]
    assert sum(counted) == len(CHUNKS)
    assert one.counters.value("connects") == 0
    server.start()
    eventually(lambda: works(one, CHUNKS), BACK_S)


def test_an_early_connection_that_died_unused_is_replaced(server, make):
    one = make(server.url)
    one.open()
    eventually(lambda: one.counters.value("connects") == 4, 20)
    server.kill()
    server.start()
    assert works(one, CHUNKS)
    assert one.counters.value("failures") == 0


def test_connections_that_come_after_the_end_are_closed(server, names, make):
    names.answers.clear()
    one = make(by_name(server))
    one.open()
    one.close()
    names.answers.set()
    eventually(connected, 20)
    assert one.counters.value("connects") == 4
    eventually(lambda: clients(server) == 0, 20)


def test_a_path_that_only_looks_up_has_one_connection(server, request):
    """As in the scheduler, which has no staging memory."""
    one = RedisPath(config=redis_path_config(server.url), metadata=metadata())
    request.addfinalizer(one.close)
    eventually(connected, 20)
    assert clients(server) == 1


def test_the_slots_of_servers_are_asked_for_once_at_the_start():
    """That is asked early; then there is no need to ask again."""
    learnt = []

    def learn():
        learnt.append(True)
        return lambda _: ("host", 1)

    links = Links(SimpleNamespace(route=lambda: None, learn=learn), Counters())
    links.open()
    eventually(lambda: learnt, 20)
    assert links.route(Deadline(20))(b"key") == ("host", 1)
    assert len(learnt) == 1
