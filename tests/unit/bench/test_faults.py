"""Faults that pass: while they last they are there, and afterwards nothing of them is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from bench.faults import passing
from deploy.runtime.redis_socket import RedisError, RedisSocket
from deploy.stack.build import REDIS_PASSWORD
from deploy.workflows.running import RunningStack, require_stack
from tests.unit.workflows.conftest import Lab, opened

Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with opened(tmp_path_factory.mktemp("faults")) as lab:
        yield of(lab)


def of(lab: Lab) -> RunningStack:
    lab.up(lab.spec())
    return require_stack(lab.home, "pdkit")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set to have a fault pass, whose time is over then."""
    over = threading.Event()
    monkeypatch.setattr(passing, "sleep", lambda _: over.wait(60))
    yield over
    over.set()


def test_each_service_and_redis_have_theirs(running: RunningStack) -> None:
    assert list(passing.faults_of(running)) == [
        "redis stopped 10 s", "producer-0 stopped 10 s", "consumer-0 stopped 10 s",
        "router stopped 10 s", "redis full 10 s",
    ]  # fmt: skip


def test_a_service_stands_still_and_goes_on(
    running: RunningStack, passes: threading.Event, eventually: Eventually
) -> None:
    fault, service = passing.faults_of(running)["consumer-0 stopped 10 s"]
    process = psutil.Process(running.state.services["consumer-0"].pid)
    during = threading.Thread(target=fault, args=(running, service))
    during.start()
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, 10.0)
    passes.set()
    during.join(20)
    assert process.status() != psutil.STATUS_STOPPED
    assert running.is_ready(service)


def test_redis_refuses_keys_and_takes_them_again(
    running: RunningStack, passes: threading.Event, eventually: Eventually
) -> None:
    fault, service = passing.faults_of(running)["redis full 10 s"]
    redis = RedisSocket(service.socket, running.secrets[REDIS_PASSWORD])
    asked = ("CONFIG", "GET", "maxmemory*")
    before = redis.ask(*asked)
    redis.ask("SET", "key", "value")
    during = threading.Thread(target=fault, args=(running, service))
    during.start()
    eventually(lambda: redis.ask(*asked) != before, 10.0)
    assert redis.ask("EXISTS", "key") == 0
    with pytest.raises(RedisError, match="OOM"):
        redis.ask("SET", "key", "value")
    passes.set()
    during.join(20)
    assert redis.ask(*asked) == before
    assert redis.ask("SET", "key", "value") == b"OK"
    redis.close()
