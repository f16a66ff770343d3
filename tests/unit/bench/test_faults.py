"""Faults: while they last they are there, afterwards nothing of them is, and each is judged."""

from __future__ import annotations

import argparse
import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import redis

from bench.faults import __main__ as program
from bench.faults import faults
from bench.faults import trial as trials
from bench.faults.faults import Fault, faults_of
from bench.faults.history import Asked, Results
from bench.faults.table import COUNTS, table
from bench.faults.trial import Load
from deploy.runtime.redis_client import client_at
from deploy.stack.layout import REDIS_PASSWORD
from deploy.workflows.running import RunningStack, require_stack
from tests.unit.workflows.conftest import Lab, opened

Eventually = Callable[..., None]
COMMANDS = [
    "deploy restart router", "deploy restart redis", "deploy up --resume --no-check",
    "deploy swap, and back",
]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with opened(tmp_path_factory.mktemp("faults")) as made:
        made.up(made.spec())
        yield made


@pytest.fixture
def running(lab: Lab) -> RunningStack:
    return require_stack(lab.home, "pdkit")


def command(*_: str) -> None:
    raise AssertionError


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set to have a fault pass, whose time is over then."""
    over = threading.Event()
    monkeypatch.setattr(faults, "sleep", lambda _: over.wait(60))
    yield over
    over.set()


def begun(running: RunningStack, fault: str) -> threading.Thread:
    during = threading.Thread(target=faults_of(running, command)[fault].happen)
    during.start()
    return during


def redis_of(running: RunningStack) -> redis.Redis:
    return client_at(running.stack.service("redis").socket, running.secrets[REDIS_PASSWORD])


def test_the_faults_of_a_stack_are_listed_by_kind(running: RunningStack, tmp_path: Path) -> None:
    known = faults_of(running, command, tmp_path)
    by_kind = {
        kind: [name for name, one in known.items() if one.kind == kind] for kind in faults.KINDS
    }
    assert by_kind["kill"] == [
        "redis killed", "producer-0 killed", "consumer-0 killed", "router killed",
        "producer-0's core killed", "consumer-0's core killed",
    ]  # fmt: skip
    assert by_kind["pass"] == [
        "redis stopped 10 s", "producer-0 stopped 10 s", "consumer-0 stopped 10 s",
        "router stopped 10 s", "redis emptied", "redis full 10 s", "redis cut off 10 s",
        "disk full 10 s",
    ]  # fmt: skip
    assert len(by_kind["pair"]) == 6
    assert "redis and consumer-0 killed" in by_kind["pair"]
    assert by_kind["command"] == COMMANDS, "the only consumer is not restarted without --force"
    assert "disk full 10 s" not in faults_of(running, command)


def test_only_the_core_of_an_engine_is_killed(
    running: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in has none, so that its helpers are made up."""
    killed: list[str] = []

    class Helper:
        def __init__(self, name: str) -> None:
            self.name = lambda: name
            self.kill = lambda: killed.append(name)

    helpers = [Helper("python"), Helper("VLLM::EngineCor"), Helper("VLLM::Worker_TP0")]
    monkeypatch.setattr(faults.sessions, "session_members", lambda *_: helpers)
    fault = faults_of(running, command)["consumer-0's core killed"]
    fault.happen()
    assert killed == ["VLLM::EngineCor"]
    assert fault.kills == ("consumer-0",)


def test_two_services_are_killed_at_once(
    running: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, _: killed.append(pid))
    fault = faults_of(running, command)["consumer-0 and router killed"]
    fault.happen()
    assert killed == [running.state.services[name].pid for name in ("consumer-0", "router")]
    assert fault.kills == ("consumer-0", "router")
    assert fault.breaks_off, "the router's answers"


def test_a_command_is_run(running: RunningStack) -> None:
    ran: list[tuple[str, ...]] = []
    known = faults_of(running, lambda *arguments: ran.append(arguments))
    for name in COMMANDS:
        known[name].happen()
    names = ("--name", "pdkit")
    assert ran == [
        ("restart", "router", *names), ("restart", "redis", *names),
        ("up", "--resume", "--no-check", *names), ("swap", "--connector", "lmcache-mp", *names),
        ("swap", "--connector", "lmcache", *names),
    ]  # fmt: skip


def test_a_service_is_stopped_and_continued(
    running: RunningStack, passes: threading.Event, eventually: Eventually
) -> None:
    process = psutil.Process(running.state.services["consumer-0"].pid)
    during = begun(running, "consumer-0 stopped 10 s")
    eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    passes.set()
    during.join(20)
    assert process.status() != psutil.STATUS_STOPPED
    assert running.is_ready(running.stack.service("consumer-0"))


def test_redis_refuses_keys_and_takes_them_again(
    running: RunningStack, passes: threading.Event, eventually: Eventually
) -> None:
    client = redis_of(running)
    before = client.config_get("maxmemory*")
    client.set("key", "value")
    during = begun(running, "redis full 10 s")
    eventually(lambda: client.config_get("maxmemory*") != before)
    assert client.exists("key") == 0
    with pytest.raises(redis.OutOfMemoryError):
        client.set("key", "value")
    passes.set()
    during.join(20)
    assert client.config_get("maxmemory*") == before
    assert client.set("key", "value") is True
    client.close()


def test_redis_loses_its_keys(running: RunningStack) -> None:
    client = redis_of(running)
    client.set("key", "value")
    faults_of(running, command)["redis emptied"].happen()
    assert client.exists("key") == 0
    client.close()


def test_redis_is_cut_off_and_reached_again(
    running: RunningStack, passes: threading.Event, eventually: Eventually
) -> None:
    client, place = redis_of(running), Path(running.stack.service("redis").socket)
    mine = client.client_id()
    during = begun(running, "redis cut off 10 s")
    eventually(lambda: not place.exists())
    with pytest.raises(redis.ConnectionError):
        redis_of(running).ping()
    passes.set()
    during.join(20)
    again = redis_of(running)
    assert str(mine) not in [one["id"] for one in again.client_list()]
    again.close()


class TestAFullDisk:
    def write(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        """Have the third write fail."""
        left = iter((5, 5))

        def write(_: int, __: bytes) -> int:
            try:
                return next(left)
            except StopIteration:
                raise OSError(number, "no more") from None

        monkeypatch.setattr(faults.os, "write", write)

    def test_a_full_disk_has_room_after_the_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there: list[list[Path]] = []
        monkeypatch.setattr(faults, "sleep", lambda _: there.append(list(tmp_path.iterdir())))
        self.write(monkeypatch, errno.ENOSPC)
        faults.fill(tmp_path)
        assert there == [[tmp_path / "pdkit-fill"]]
        assert not list(tmp_path.iterdir())

    def test_other_errors_are_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write(monkeypatch, errno.EROFS)
        with pytest.raises(OSError, match="no more"):
            faults.fill(tmp_path)
        assert not list(tmp_path.iterdir())


class TestTrial:
    """Requests are made up; the stack is there."""

    LOAD = Load(("one", "two"), {0: "abcd", 1: "efgh"}, 2, 4, (0.0, 0.01), 0.0, 60.0, 60.0)

    @pytest.fixture
    def tried(
        self, running: RunningStack, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., dict[str, Any]]:
        """Return what becomes of a trial whose clients see this, seconds from the fault on."""

        def tried(fault: Fault, *seen: tuple[float, float, dict[str, Any]]) -> dict[str, Any]:
            @contextmanager
            def clients(*arguments: Any, **_: Any) -> Iterator[None]:
                began = time.monotonic()
                yield
                for sent_s, ended_s, fields in seen:
                    known = {"prompt": 0, "status": 200, "text": "abcd", "trouble": "",
                             "stream": False, **fields}  # fmt: skip
                    arguments[3].add(Asked(sent_s=began + sent_s, ended_s=began + ended_s, **known))

            monkeypatch.setattr(trials, "Clients", clients)
            return trials.trial(lambda: running, fault, self.LOAD, 7, None)

        return tried

    NOTHING = Fault("nothing", "pass", lambda: None)
    BROKEN: ClassVar[dict[str, Any]] = {"text": "", "status": 0, "trouble": "ReadError"}

    def test_each_request_is_counted_as_what_it_is(self, tried: Any) -> None:
        row = tried(
            self.NOTHING,
            (-9, -8, {}), (0, 1, {"prompt": 1, "text": "efgh"}), (0, 99, {}),
            (0, 1, {"text": "abcx"}), (0, 1, self.BROKEN),
            (0, 1, {"status": 503, "text": "", "trouble": "no engine can answer"}),
            (0, 1, {"stream": True, "text": "ab", "trouble": "it is not complete"}),
        )  # fmt: skip
        counted = {name: row[name] for name in ("requests", "right", "late", "wrong", "lost")}
        assert counted == {"requests": 7, "right": 2, "late": 1, "wrong": 1, "lost": 1}
        assert (row["refused"], row["ended"], row["cut"], row["meanwhile"]) == (1, 1, 0, 6)
        assert len(row["bad"]) == 3, "late, wrong and lost"
        assert (row["fault"], row["seed"], row["started again"]) == ("nothing", 7, [])

    def test_a_killed_router_breaks_off_what_it_has_and_nothing_else(self, tried: Any) -> None:
        fault = Fault("router killed", "kill", lambda: None, breaks_off=True)
        row = tried(fault, (-1, 1, self.BROKEN), (5, 6, self.BROKEN))
        assert (row["cut"], row["lost"], len(row["bad"])) == (1, 1, 1)

    def test_a_service_that_does_not_come_back_is_reported(
        self, tried: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self, "LOAD", replace(self.LOAD, back_s=0.0))
        with pytest.raises(SystemExit, match="nothing: the stack is not whole again after 0 s"):
            tried(Fault("nothing", "kill", lambda: None, kills=("router",)))


class TestResults:
    ROW: ClassVar[dict[str, Any]] = {"fault": "redis killed", "seed": 1, "bad": ["Asked(...)"]}

    def test_a_later_run_leaves_out_what_is_done(self, tmp_path: Path) -> None:
        first = Results(tmp_path / "new")
        assert not first.has("redis killed", 1)
        first.add(self.ROW)
        again = Results(tmp_path / "new")
        assert again.has("redis killed", 1)
        assert not again.has("redis killed", 101)
        assert (first.bad, again.bad) == (1, 1)

    def test_requests_of_an_aborted_trial_are_removed(self, tmp_path: Path) -> None:
        results = Results(tmp_path)
        file = results.requests_of("redis killed", 1)
        assert file == tmp_path / "redis-killed-1.jsonl"
        file.write_text("old")
        results.requests_of("redis killed", 1)
        assert not file.exists()

    def test_nothing_is_kept_without_a_folder(self) -> None:
        results = Results(None)
        results.add(self.ROW)
        assert results.bad == 1
        assert results.requests_of("redis killed", 1) is None


def test_trials_of_a_fault_are_added_up() -> None:
    counts = dict.fromkeys(COUNTS, 0) | {"requests": 5, "right": 4, "cut": 1}
    rows = [
        {"fault": fault, **counts, "longest s": at, "whole after s": 10.0 * at}
        for at, fault in enumerate(("a killed", "b stopped", "a killed", "a killed"), 1)
    ]
    head, _, first, second = table(rows)
    assert head.startswith("| fault | trials | requests | right | refused |")
    assert first == "| a killed | 3 | 15 | 12 | 0 | 0 | 3 | 0 | 0 | 0 | 4 s | 30.0 s, 40.0 s |"
    assert second == "| b stopped | 1 | 5 | 4 | 0 | 0 | 1 | 0 | 0 | 0 | 2 s | 20.0 s, 20.0 s |"


class TestChosen:
    def given(self, *arguments: str) -> argparse.Namespace:
        return program.options().parse_args(arguments)

    def test_faults_are_chosen_by_kind_and_by_name(self, running: RunningStack) -> None:
        assert program.chosen(running, self.given("--only", "command")) == COMMANDS
        assert program.chosen(running, self.given("--fault", "redis emptied")) == ["redis emptied"]

    def test_an_unknown_fault_is_refused(self, running: RunningStack) -> None:
        with pytest.raises(SystemExit, match="no fault redis melted; known: redis killed, "):
            program.chosen(running, self.given("--fault", "redis melted"))
