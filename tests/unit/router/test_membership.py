"""Engines that are found by the name of a Service, and drained ones; the resolver is a fake."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pdkit_router.membership import Discovery, Drains, RoleService, resolved, source
from pdkit_router.metrics import FrontDoor
from pdkit_router.request import Refused, Request
from pdkit_router.route import Everyone, Forwarder, Group
from pdkit_router.upstream import Engine, HealthChecker

from tests.unit.router.conftest import Router, Start
from tests.unit.router.stand_in import Loop, StandIn

FIRST, SECOND, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Answers(HealthChecker):
    """Every engine answers at once; what is wrong with the watcher, a test says."""

    def __init__(self) -> None:
        super().__init__((), lambda _: None)
        self.problem: Exception | None = None

    async def watch(self, engine: Engine) -> None:
        engine.state, engine.asked = "up", True
        while self.problem is None:
            await asyncio.sleep(0)
        raise self.problem


class Lab:
    """A source of engines, and who follows it."""

    def __init__(self) -> None:
        self.addresses: Collection[str] | OSError = ()
        self.group, self.checker = Group(()), Answers()
        found_by = RoleService("consumer", "consumers", 8000)
        self.discovery = Discovery(found_by, self.group, self.checker, "key", self.resolve)

    async def resolve(self, host: str, port: int) -> Collection[str]:
        assert (host, port) == ("consumers", 8000)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    async def sees(self, *addresses: str) -> list[str]:
        """Show these addresses; return those that get requests."""
        self.addresses = addresses
        return await self.look()

    async def look(self) -> list[str]:
        await self.discovery.look()
        await asyncio.sleep(0)  # the watchers of new engines begin
        return [engine.host for engine in self.group.all if engine.serves]


def in_lab(story: Callable[[Lab], Awaitable[None]]) -> None:
    async def tell() -> None:
        await story(Lab())

    asyncio.run(tell())


def test_new_engines_are_used_without_a_restart() -> None:
    async def story(lab: Lab) -> None:
        assert lab.group.wanted
        assert await lab.sees(FIRST) == [FIRST]
        assert await lab.sees(SECOND, FIRST) == [FIRST, SECOND]
        assert [engine.name for engine in lab.group.all] == [
            "consumer-10.0.0.1",
            "consumer-10.0.0.2",
        ]
        assert {engine.key for engine in lab.group.all} == {"key"}

    in_lab(story)


def test_a_later_engine_is_warmed_up() -> None:
    async def story(lab: Lab) -> None:
        running = asyncio.ensure_future(lab.discovery.run())
        await lab.sees(FIRST)
        await lab.discovery.asked.wait()
        await lab.sees(FIRST, SECOND)
        assert [engine.gone for engine in lab.group.all] == [False, True]
        running.cancel()

    in_lab(story)


def test_a_removed_engine_finishes_its_requests() -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST, SECOND)
        leaving = lab.group.all[0]
        leaving.busy = 1
        assert await lab.sees(SECOND, THIRD) == [SECOND, THIRD]
        assert leaving in lab.group.all
        assert {lab.group.choose(()) for _ in range(6)} == {*lab.group.all} - {leaving}
        leaving.busy = 0
        await lab.look()
        assert leaving not in lab.group.all

    in_lab(story)


def test_an_engine_that_returns_in_time_is_kept() -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST, SECOND)
        first = lab.group.all[0]
        first.busy = 1
        assert await lab.sees(SECOND) == [SECOND]
        assert await lab.sees(FIRST, SECOND) == [FIRST, SECOND]
        assert lab.group.all[0] is first

    in_lab(story)


@pytest.mark.parametrize("answer", [(), socket.gaierror(socket.EAI_AGAIN, "try again")])
def test_engines_stay_if_the_name_server_fails(answer: Any) -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST)
        lab.addresses = answer
        assert await lab.look() == [FIRST]

    in_lab(story)


def test_a_watcher_that_ends_is_an_error() -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST)
        lab.checker.problem = RuntimeError("a bug")
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="a bug"):
            await lab.look()

    in_lab(story)


def test_a_removed_engine_gets_no_health_checks() -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST)
        await lab.sees(SECOND)
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(others) == 1

    in_lab(story)


def test_a_group_waits_for_its_first_engine() -> None:
    class Answer:
        def whole(self, status: int, _: object, body: bytes) -> None:
            self.status, self.body = status, json.loads(body)

    async def story(lab: Lab) -> None:
        await lab.sees(FIRST)
        producers = Group(())
        forwarder = Forwarder(producers, lab.group, "recompute", 1.0, Counter())
        front, answer = FrontDoor(forwarder), Answer()
        request: Any = type("Ready", (), {"path": "/readiness"})
        await front.serve(request, answer)  # type: ignore[arg-type]
        assert answer.status == 200, "aggregated engines"
        producers.wanted = True
        await front.serve(request, answer)  # type: ignore[arg-type]
        assert (answer.status, answer.body["status"]) == (503, "degraded")

    in_lab(story)


def test_requests_are_refused_without_a_producer_if_configured() -> None:
    async def story(lab: Lab) -> None:
        await lab.sees(FIRST)
        producers = Group(())
        producers.wanted = True
        forwarder = Forwarder(producers, lab.group, "refuse", 1.0, Counter())
        body = bytearray(b'{"model": "m", "prompt": "x"}')
        with pytest.raises(Refused, match="no producer can compute"):
            await forwarder.serve(Request("POST", "/v1/completions", (), body), None)  # type: ignore[arg-type]
        assert forwarder.counts["degraded"] == 1

    in_lab(story)


def test_a_group_without_engines_has_none_to_choose() -> None:
    group = Group((), slips=True)
    assert group.choose(()) is None
    assert Everyone(group).all == ()
    group.become([engine := Engine("a", "a", 1)])
    assert Everyone(group).all == (engine,)


@pytest.mark.parametrize("text", [
    "http://a:1?role=producer", "dns://a?role=producer", "dns://a:1", "dns://a:1?role=router",
    "dns://:1?role=producer", "dns://a:x?role=producer", "",
])  # fmt: skip
def test_an_invalid_source_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not dns://HOST:PORT"):
        source(text)


def test_a_source_is_read() -> None:
    assert source("dns://producer:8000?role=producer") == RoleService("producer", "producer", 8000)


def test_a_name_has_its_addresses_once() -> None:
    assert asyncio.run(_addresses("127.0.0.1")) == {"127.0.0.1"}


async def _addresses(name: str) -> set[str]:
    return set(await resolved(name, 80))


def test_the_program_serves_with_engines_that_it_found(start_router: Start, loop: Loop) -> None:
    roles = ("producer", "consumer")
    engines = {role: StandIn(loop, role) for role in roles}
    options = [
        part
        for role, engine in engines.items()
        for part in ("--engines-from", f"dns://127.0.0.1:{engine.port}?role={role}")
    ]
    router: Router = start_router(*options, names=(), expected=(1, 1))
    answer = router.client.post(
        "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"x-pdkit-trace": "1"}
    )
    assert answer.status_code == 200
    assert (
        "producer=producer-127.0.0.1; consumer=consumer-127.0.0.1"
        in answer.headers["x-pdkit-trace"]
    )
    assert 'engine="consumer-127.0.0.1",role="consumer"' in router.metrics()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "damage",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b"\xff"),
    ],
    ids=["pipe", "folder", "device", "binary"],
)
def test_engines_stay_as_they_were_while_the_drain_file_cannot_be_read(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """A router that waited for the writer of a pipe would serve nobody."""
    engine: Any = SimpleNamespace(name="consumer-0", drained=False)
    drains = Drains(tmp_path / "drained", [engine])
    (tmp_path / "drained").write_text("consumer-0\n")
    drains.read()
    assert engine.drained
    (tmp_path / "drained").unlink()
    damage(tmp_path / "drained")
    drains.read()
    assert engine.drained
