"""A watch of real processes: what it counts, and what it tells of deaths, restarts and the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from deploy.errors import DockerUnavailable, StateError
from deploy.metrics.frame import Frame
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.process.sessions import has_ended
from deploy.stack.service import Service
from deploy.workflows import watch as watch_module
from deploy.workflows.down import stop_stack
from deploy.workflows.running import RunningStack, require_stack, store_of
from deploy.workflows.status import stack_status
from deploy.workflows.watch import StackWatch
from tests.unit.workflows.conftest import Lab

PROMPT = list(range(200))


def told(frame: Frame) -> list[tuple[str, str]]:
    return [(event.kind, event.about) for event in frame.events]


def told_of(frame: Frame, name: str) -> list[str]:
    """Return what is told of one service; the router may complain of it at any moment."""
    return [event.kind for event in frame.events if event.about == name]


def engine(frame: Frame, name: str) -> dict[str, Any]:
    return next(one.as_dict() for one in frame.engines if one.name == name)


def ask(running: RunningStack, name: str, prompt: list[int]) -> None:
    with running.api(running.stack.service(name)) as api:
        api.complete("m", prompt, max_tokens=2)


def kill(lab: Lab, name: str, eventually: Callable[..., None]) -> None:
    pid = require_stack(lab.home, "pdkit").state.services[name].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(psutil.Process(pid)))


def test_a_watch_shows_a_stack_from_start_to_end(lab: Lab, eventually: Callable[..., None]) -> None:
    watch = StackWatch(lab.home, "pdkit")
    assert not watch.frame().up

    spec = lab.spec(topology="1p2d")  # without a consumer the router would not be ready
    running = lab.up(spec).running
    frame = watch.frame()
    assert told(frame) == [("up", "stack")]
    assert frame.sick == []
    assert set(frame.conditions) == {
        "redis", "producer-0", "consumer-0", "consumer-1", "router",
    }  # fmt: skip

    ask(running, "producer-0", PROMPT)
    ask(running, "consumer-0", PROMPT)
    frame = watch.frame()
    assert told_of(frame, "consumer-0") == []
    interval = engine(frame, "consumer-0")["interval"]
    assert (interval["external_queries"], interval["external_hits"]) == (200, 192)
    assert frame.store is not None and frame.store.interval is not None
    assert frame.store.stats.keys == 3
    assert (frame.store.interval.received_bytes or 0) > 0

    kill(lab, "consumer-0", eventually)
    frame = watch.frame()
    assert told_of(frame, "consumer-0") == ["exited"]
    assert frame.sick == ["consumer-0"]
    assert engine(frame, "consumer-0")["load"] is None
    assert told_of(watch.frame(), "consumer-0") == [], "it is told once"

    lab.up(spec)
    ask(running, "consumer-0", PROMPT)
    frame = watch.frame()
    assert told_of(frame, "consumer-0") == ["restarted", "ready"]
    assert engine(frame, "consumer-0")["watch"]["external_queries"] == 400, "of both its lives"

    stop_stack(lab.home, "pdkit", lab.lines.append)
    frame = watch.frame()
    assert told(frame) == [("down", "stack")]
    assert not frame.up


def test_a_watch_shows_redis(lab: Lab, eventually: Callable[..., None]) -> None:
    spec = lab.spec()
    running = lab.up(spec).running
    watch = StackWatch(lab.home, "pdkit")
    watch.frame()
    kill(lab, "redis", eventually)
    frame = watch.frame()
    assert ("exited", "redis") in told(frame)
    assert frame.store is None
    lab.up(spec)
    assert ("redis_restarted", "redis") in told(watch.frame())
    with store_of(running) as store:
        store._shards[0]._client.flushall()  # type: ignore[attr-defined]
    assert ("redis_flushed", "redis") in told(watch.frame())


def test_complaints_in_logs_from_now_on(served: Lab) -> None:
    log = served.home.stack("pdkit").logs_dir / "consumer-1.log"
    with log.open("a") as file:
        file.write("OSError: before the watch began\n")
    watch = StackWatch(served.home, "pdkit")
    watch.frame()
    with log.open("a") as file:
        file.write("2026-01-01 10:00:00,123 WARNING pdkit-connector WARNING Redis: it is slow\n")
    (event,) = watch.frame().events
    assert (event.kind, event.about, event.text) == ("warning", "consumer-1", "Redis: it is slow")


def test_each_page_is_read_once(served: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = EngineApi.metrics

    def metrics(api: EngineApi) -> Any:
        asked.append(str(api._url))
        return real(api)

    monkeypatch.setattr(EngineApi, "metrics", metrics)
    StackWatch(served.home, "pdkit").frame()
    engines = require_stack(served.home, "pdkit").prepared.plan.engines
    urls = [f"http://127.0.0.1:{one.port}" for one in engines]
    assert sorted(set(asked) & set(urls)) == sorted(urls)
    assert len(asked) == len(set(asked))


def test_a_hung_engine_stops_no_other(served: Lab) -> None:
    watch = StackWatch(served.home, "pdkit")
    watch.frame()
    pid = require_stack(served.home, "pdkit").state.services["consumer-1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        frame = watch.frame()
        assert time.monotonic() - began < 60
    finally:
        os.kill(pid, signal.SIGCONT)
    assert told_of(frame, "consumer-1") == ["not_ready"]
    loads = {one.name: one.load for one in frame.engines}
    assert loads.pop("consumer-1") is None
    assert None not in loads.values()
    assert ("ready", "consumer-1") in told(watch.frame())


def test_a_service_has_longer_for_status(served: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a sound service can take seconds; only the watch has no time to wait."""
    limits: list[float] = []
    real = RunningStack.is_ready

    def is_ready(self: RunningStack, service: Service, *, within_s: float) -> bool:
        limits.append(within_s)
        return real(self, service, within_s=within_s)

    monkeypatch.setattr(RunningStack, "is_ready", is_ready)
    stack_status(served.home, "pdkit")
    assert set(limits) == {10.0}
    limits.clear()
    StackWatch(served.home, "pdkit").frame()
    assert set(limits) == {2.0}


class TestTrouble:
    def test_an_error_in_the_first_frame_is_raised(self, lab: Lab) -> None:
        files = lab.home.stack("pdkit")
        files.root.mkdir(parents=True)
        files.state_file.write_text("{")
        with pytest.raises(StateError):
            StackWatch(lab.home, "pdkit").frame()

    @pytest.mark.parametrize("error", [DockerUnavailable("no Docker engine"), OSError("gone")])
    def test_a_later_failure_is_reported_and_the_watch_continues(
        self, served: Lab, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        watch = StackWatch(served.home, "pdkit")
        watch.frame()

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(watch_module, "find_stack", fail)
            frame = watch.frame()
        assert frame.trouble == str(error)
        assert told(frame) == [("trouble", "stack")]
        after = watch.frame()
        assert after.up
        assert told(after) == []
