"""Restart and drain: what is asked first, what clients notice, and what is written down."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deploy import __version__
from deploy.document import as_document
from deploy.errors import StackUnhealthy, StateError
from deploy.output.views import status_view
from deploy.runtime.drains import drained_engines
from deploy.runtime.events import read_events
from deploy.runtime.state import ServiceRecord
from deploy.workflows import status
from deploy.workflows.drain import DrainOptions, drain, engine_views, undrain
from deploy.workflows.prepare import Prepared
from deploy.workflows.restart import restart_services
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import Lab

Eventually = Callable[..., None]
AT_ONCE = DrainOptions(wait_s=20)


@dataclass
class Load:
    """Clients that ask all the time, each on a connection that it keeps."""

    url: str
    statuses: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self.ask) for _ in range(4)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(60)

    def ask(self) -> None:
        body = {"prompt": list(range(100)), "max_tokens": 1}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            while not self.ended.wait(0.01):
                try:
                    self.statuses.append(client.post("/v1/completions", json=body).status_code)
                except httpx.HTTPError as exc:
                    self.failures.append(repr(exc))


@pytest.fixture
def stack(served: Lab, eventually: Eventually) -> Iterator[Lab]:
    """One producer and two consumers, all in use."""
    running = require_stack(served.home, "pdkit")

    def in_use() -> bool:
        views = engine_views(running) or ()
        return len(views) == 3 and all(view.healthy for view in views)

    eventually(in_use)
    yield served
    for engine in drained(served):
        undrain(served.home, "pdkit", engine)


def drained(lab: Lab) -> set[str]:
    return set(drained_engines(lab.home.stack("pdkit").drain_file))


@contextmanager
def half_a_restart(lab: Lab, engine: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has drained an engine and gets no further."""
    program = (
        "import sys, time, pathlib; from deploy.runtime.drains import drained_by_command\n"
        "with drained_by_command(pathlib.Path(sys.argv[1]), sys.argv[2:]):\n"
        "    print('drained', flush=True); time.sleep(600)"
    )
    argv = (sys.executable, "-c", program, str(lab.home.stack("pdkit").drain_file), engine)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "drained\n"
            yield process
        finally:
            process.kill()


def pids(lab: Lab) -> dict[str, int]:
    state = require_stack(lab.home, "pdkit").state
    return {name: record.pid for name, record in state.services.items()}


def events(lab: Lab) -> list[tuple[str, str]]:
    found = read_events(lab.home.stack("pdkit").events_file)
    return [(event.service, event.kind) for event in found]


class TestRestart:
    def test_engines_restart_in_turn_without_a_lost_request(self, stack: Lab) -> None:
        before, noted = pids(stack), len(events(stack))
        with Load(require_stack(stack.home, "pdkit").stack.front.url) as load:
            result = restart_services(stack.home, "pdkit", None, stack.lines.append, AT_ONCE)
        engines = ["producer-0", "consumer-0", "consumer-1"]
        assert list(result.seconds) == engines
        after = pids(stack)
        assert {name for name in before if after[name] != before[name]} == set(engines)
        assert events(stack)[noted:] == [(name, "restarted") for name in engines]
        assert not drained(stack)
        assert load.failures == []
        assert set(load.statuses) == {200}
        assert len(load.statuses) > 10

    def test_the_router_without_a_lost_request(self, stack: Lab) -> None:
        """Without a supervisor, nobody holds its socket; so clients begin afterwards."""
        before = pids(stack)
        restart_services(stack.home, "pdkit", "router", stack.lines.append, AT_ONCE)
        assert {n for n, pid in pids(stack).items() if pid != before[n]} == {"router"}
        stack.ask()

    def test_redis_and_engines_find_the_new_one(self, stack: Lab) -> None:
        before = pids(stack)
        restart_services(stack.home, "pdkit", "redis", stack.lines.append, AT_ONCE)
        assert {n for n, pid in pids(stack).items() if pid != before[n]} == {"redis"}
        stack.ask()

    def test_a_drained_engine_stays_drained_after_a_restart(self, stack: Lab) -> None:
        drain(stack.home, "pdkit", "consumer-1", stack.lines.append, AT_ONCE)
        restart_services(stack.home, "pdkit", "consumer-1", stack.lines.append, AT_ONCE)
        assert drained(stack) == {"consumer-1"}

    def test_a_killed_restart_leaves_no_engine_drained(
        self, stack: Lab, eventually: Eventually
    ) -> None:
        drain(stack.home, "pdkit", "consumer-1", stack.lines.append, AT_ONCE)
        running = require_stack(stack.home, "pdkit")

        def seen() -> set[str]:
            return {view.name for view in engine_views(running) or () if view.drained}

        with half_a_restart(stack, "consumer-0") as process:
            eventually(lambda: seen() == {"consumer-0", "consumer-1"})
            text = status_view(stack_status(stack.home, "pdkit"))
            assert f"drained by a restart or swap (pid {process.pid})" in text
            process.kill()
            process.wait(10)
            eventually(lambda: seen() == {"consumer-1"})
        assert drained(stack) == {"consumer-1"}, "a person's stays"
        shown = {one.name: one.drained_by for one in stack_status(stack.home, "pdkit").services}
        assert {name: who for name, who in shown.items() if who} == {"consumer-1": "deploy drain"}
        undrain(stack.home, "pdkit", "consumer-0")
        left = stack.home.stack("pdkit").drain_file.read_text()
        assert left == "consumer-1\n", "an older router takes the killed one's line for a drain"
        undrain(stack.home, "pdkit", "consumer-1")
        assert not stack.home.stack("pdkit").drain_file.read_text(), "its line is gone, too"

    def test_a_service_that_is_not_there(self, stack: Lab) -> None:
        with pytest.raises(StateError, match="no service 'consumer-9'; it has: redis, "):
            restart_services(stack.home, "pdkit", "consumer-9", stack.lines.append, AT_ONCE)

    def test_the_only_one_in_use_is_not_restarted_unless_it_is_forced(self, stack: Lab) -> None:
        before = pids(stack)
        drain(stack.home, "pdkit", "consumer-1", stack.lines.append, AT_ONCE)
        for service in ("consumer-0", None):
            with pytest.raises(StateError, match="consumer-0 is the only consumer") as caught:
                restart_services(stack.home, "pdkit", service, stack.lines.append, AT_ONCE)
            assert "--force" in caught.value.hint
        assert pids(stack) == before, "not even the first of them"
        force = DrainOptions(wait_s=20, force=True)
        restart_services(stack.home, "pdkit", "consumer-0", stack.lines.append, force)
        assert pids(stack)["consumer-0"] != before["consumer-0"]


class TestAnOlderVersion:
    def started_by(self, stack: Lab, version: str) -> None:
        file = stack.home.stack("pdkit").state_file
        state = json.loads(file.read_text())
        for record in state["services"].values():
            record["version"] = version
        file.write_text(json.dumps(state))

    @pytest.fixture(autouse=True)
    def judged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every engine is warned of that is judged at all."""
        monkeypatch.setattr(
            status, "stack_warnings", lambda _, pages: [f"{name} is odd" for name in pages]
        )

    def test_is_named_with_the_command_and_its_engines_are_not_judged(self, stack: Lab) -> None:
        self.started_by(stack, "0.0.7")
        (warning,) = stack_status(stack.home, "pdkit").warnings
        assert "pdkit 0.0.7 started" in warning
        assert f"producer-0, consumer-0, consumer-1, router; this is {__version__}" in warning
        assert warning.endswith(
            "deploy restart --name pdkit, then deploy restart router --name pdkit"
        )

    def test_a_store_that_runs_the_kits_code_comes_first(
        self, prepared: Callable[..., Prepared]
    ) -> None:
        stack = prepared(connector="lmcache-mp", runtime="process").stack
        records = {one.name: ServiceRecord(one.name, version="0.0.7") for one in stack.services}
        running: Any = SimpleNamespace(stack=stack, state=SimpleNamespace(services=records))
        (warning,) = status._older(running)
        commands = warning.partition("restart them: ")[2].split(", then ")
        assert commands == [
            "deploy restart kv-server --name pdkit",
            "deploy restart --name pdkit",
            "deploy restart router --name pdkit",
        ]

    def test_is_gone_after_these_commands(self, stack: Lab) -> None:
        self.started_by(stack, "0.0.7")
        restart_services(stack.home, "pdkit", "consumer-0", stack.lines.append, AT_ONCE)
        first, odd = stack_status(stack.home, "pdkit").warnings
        assert "consumer-0" not in first
        assert odd == "consumer-0 is odd"
        for service in (None, "router"):
            restart_services(stack.home, "pdkit", service, stack.lines.append, AT_ONCE)
        warnings = stack_status(stack.home, "pdkit").warnings
        assert not [line for line in warnings if "started" in line]
        assert len(warnings) == 3


class TestDrain:
    def test_an_engine_gets_nothing_until_undrain(self, stack: Lab) -> None:
        noted = len(events(stack))
        drain(stack.home, "pdkit", "consumer-0", stack.lines.append, AT_ONCE)
        found = stack_status(stack.home, "pdkit")
        shown = {service.name: service.drained for service in found.services}
        assert [name for name, is_drained in shown.items() if is_drained] == ["consumer-0"]
        assert "ready, drained by deploy drain" in status_view(found)
        assert "consumer-0 gets no new requests" in status_view(found)
        assert as_document(found)["events"][-1]["kind"] == "drained"
        undrain(stack.home, "pdkit", "consumer-0")
        undrain(stack.home, "pdkit", "consumer-0")
        assert events(stack)[noted:] == [("consumer-0", "drained"), ("consumer-0", "undrained")]

    def test_an_engine_whose_requests_do_not_end_stays_drained(
        self, stack: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from deploy.metrics.router import EngineView

        busy = EngineView("consumer-0", "consumer", True, True, 3, 3)
        other = EngineView("consumer-1", "consumer", True, False, 0, 0)
        monkeypatch.setattr("deploy.workflows.drain.engine_views", lambda _: (busy, other))
        with pytest.raises(StackUnhealthy, match=r"still has 3 requests after 0\.2 s"):
            drain(stack.home, "pdkit", "consumer-0", stack.lines.append, DrainOptions(wait_s=0.2))
        assert drained(stack) == {"consumer-0"}

    def test_the_only_producer_may_go_while_consumers_can_compute(self, stack: Lab) -> None:
        drain(stack.home, "pdkit", "producer-0", stack.lines.append, AT_ONCE)
        stack.ask()
        running = require_stack(stack.home, "pdkit")
        assert [view.name for view in engine_views(running) or () if view.drained] == ["producer-0"]

    @pytest.mark.parametrize("engine", ["router", "redis", "consumer-9"])
    def test_services_that_are_no_engines_cannot_be_drained(self, stack: Lab, engine: str) -> None:
        for work in (
            lambda: drain(stack.home, "pdkit", engine, stack.lines.append, AT_ONCE),
            lambda: undrain(stack.home, "pdkit", engine),
        ):
            with pytest.raises(StateError, match=f"no engine '{engine}'; it has: producer-0, "):
                work()
