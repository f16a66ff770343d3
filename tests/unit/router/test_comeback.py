"""Engines that are drained, that come back, and a router that is started again under load."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pdkit_router import upstream
from pdkit_router.route import PrefixGroup
from pdkit_router.upstream import Engine, HealthChecker

from tests.ports import unused_port
from tests.unit.router import stand_in
from tests.unit.router.conftest import ROUTER, Router, Start, engines_up
from tests.unit.router.stand_in import Loop, StandIn

Eventually = Callable[..., None]
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 5}


def posts(engine: StandIn) -> list[str]:
    return [str(seen.json["prompt"]) for seen in engine.seen if seen.method == "POST"]


@asynccontextmanager
async def watched(
    stand: StandIn, on_context: Callable[[int], None] = lambda _: None
) -> AsyncIterator[tuple[Engine, HealthChecker]]:
    """Have a router's checker watch an engine meanwhile."""
    engine = Engine(stand.name, "127.0.0.1", stand.port)
    checker = HealthChecker([engine], on_context)
    watching = asyncio.ensure_future(checker.run())
    try:
        yield engine, checker
    finally:
        watching.cancel()


def test_requests_do_not_wait_for_the_routers_own_questions(loop: Loop) -> None:
    stand = StandIn(loop, "producer-0", frozen=True)

    async def asked() -> None:
        engine = Engine("producer-0", "127.0.0.1", stand.port)
        asking = asyncio.ensure_future(engine.ask("GET", "/health"))
        while not any(one.exchange for one in engine.connections.open):
            await asyncio.sleep(0.005)
        assert engine.connections.awaited == 0
        async with engine.exchange(
            engine.request("GET", "/v1/models", (), b""), for_client=True
        ) as exchange:
            await exchange.rest()
        connection = await engine.connections.get()
        connection.start(engine.request("GET", "/health", (), b""))
        assert engine.connections.awaited == 0, "its last exchange was a client's"
        stand.frozen = False
        await asking
        connection.abandon()

    loop.run(asked())


def test_an_engine_that_refuses_the_router_is_named_with_its_answer(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    stand = StandIn(loop, "producer-0", models=b"{}", models_status=401)

    async def asked() -> None:
        async with watched(stand, lambda _: None) as (engine, checker):
            await checker.asked.wait()
            assert engine.state == "down"
            assert [r.getMessage() for r in caplog.records if r.name == "router"] == [
                "producer-0 answers /health, but /v1/models with 401: not used"
            ]

    loop.run(asyncio.wait_for(asked(), 60))


@pytest.mark.parametrize(
    "models",
    [
        b"",  # of another program, whose health checks answer so
        b"[" * 100_000, b'{"data": [{"id": "m", "max_model_len": 1e999}]}', b'{"data": []}',
        b"[5]", b"<html>",
    ],
    ids=["empty", "levels", "infinity", "none", "list", "html"],
)  # fmt: skip
def test_an_engine_without_models_gets_no_requests(
    loop: Loop, models: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stand = StandIn(loop, "producer-0", models=models)
    lengths: list[int] = []

    def gets() -> int:
        return sum(seen.path == "/v1/models" for seen in stand.seen)

    async def asked() -> None:
        async with watched(stand, lengths.append) as (engine, checker):
            await checker.asked.wait()
            while gets() < 3:
                await asyncio.sleep(0.01)
            assert (engine.state, lengths) == ("down", [])
            assert [r.getMessage() for r in caplog.records if r.name == "router"] == [
                "producer-0 answers /health, but lists no models: not used"
            ]
            # A LoRA adapter has no length of its own.
            stand.models = (
                b'{"data": [{"id": "m", "max_model_len": 2048}, '
                b'{"id": "a", "max_model_len": null}]}'
            )
            while engine.state != "up":
                await asyncio.sleep(0.01)
            assert lengths == [2048]

    loop.run(asyncio.wait_for(asked(), 60))


def test_a_router_that_starts_waits_for_engines_that_are_slow(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any engine, it would refuse the requests that waited for it."""
    monkeypatch.setattr(upstream, "_ANSWER_S", 0.02)
    stand = StandIn(loop, "producer-0", frozen=True)

    async def asked() -> None:
        async with watched(stand) as (engine, checker):
            await asyncio.sleep(0.3)
            assert not checker.asked.is_set()
            stand.frozen = False
            await checker.asked.wait()
            assert engine.state == "up"

    loop.run(asyncio.wait_for(asked(), 60))


def test_a_router_that_starts_does_not_wait_for_an_engine_that_hangs(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "_GREET_S", 0.1)
    stand = StandIn(loop, "producer-0", frozen=True)

    async def asked() -> None:
        async with watched(stand) as (engine, checker):
            await checker.asked.wait()
            assert engine.state == "down"
        stand.frozen = False

    loop.run(asyncio.wait_for(asked(), 60))


class TestDrained:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "drained"

    @pytest.fixture
    def router(self, start_router: Start, file: Path) -> Router:
        return start_router("--drain-file", str(file))

    def gauge(self, router: Router, name: str) -> int:
        return router.count(f'engine_drained{{engine="{name}"')

    def test_a_drained_engine_gets_no_new_requests(
        self, router: Router, file: Path, eventually: Eventually
    ) -> None:
        drained, other = router.consumers
        file.write_text(f"{drained.name}\n")
        eventually(lambda: self.gauge(router, drained.name) == 1)
        assert router.client.get("/readiness").json()["decode"] == {
            "healthy": 1, "drained": 1, "total": 2,
        }  # fmt: skip
        for _ in range(4):
            assert router.client.post(COMPLETIONS, json=BODY).json()["by"] == other.name
        assert not posts(drained)
        file.unlink()
        eventually(router.ready)
        answers = {router.client.post(COMPLETIONS, json=BODY).json()["by"] for _ in range(4)}
        assert answers == {drained.name, other.name}

    def test_a_restart_drains_only_while_it_holds_the_lock(
        self, router: Router, file: Path, eventually: Eventually
    ) -> None:
        restarted, by_person = router.consumers
        with file.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file.write_text(f"{restarted.name} restart:1\n{by_person.name}\n")
            eventually(lambda: self.gauge(router, restarted.name) == 1)
            assert self.gauge(router, by_person.name) == 1
        eventually(lambda: self.gauge(router, restarted.name) == 0)
        assert self.gauge(router, by_person.name) == 1

    def test_requests_of_a_drained_engine_end(
        self, router: Router, file: Path, eventually: Eventually
    ) -> None:
        for consumer in router.consumers:
            consumer.does = stand_in.waits
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(router.client.post(COMPLETIONS, json=BODY))
        )
        asking.start()
        eventually(lambda: any(posts(consumer) for consumer in router.consumers))
        (busy,) = [consumer for consumer in router.consumers if posts(consumer)]
        file.write_text(busy.name)
        eventually(lambda: self.gauge(router, busy.name) == 1)
        assert router.count(f'engine_busy{{engine="{busy.name}"') == 1
        assert router.count(f'engine_awaited{{engine="{busy.name}"') == 1
        busy.go.set()
        asking.join(20)
        assert answers[0].json()["by"] == busy.name
        assert router.count(f'engine_busy{{engine="{busy.name}"') == 0

    def test_requests_get_503_if_all_engines_of_a_role_are_drained(
        self, router: Router, file: Path, eventually: Eventually
    ) -> None:
        file.write_text("consumer-0\nconsumer-1\n")
        eventually(lambda: router.client.get("/health").status_code == 503)
        answer = router.client.post(COMPLETIONS, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    def test_an_unreadable_drain_file_changes_nothing(
        self, router: Router, file: Path, eventually: Eventually
    ) -> None:
        file.write_text("consumer-0")
        eventually(lambda: self.gauge(router, "consumer-0") == 1)
        file.unlink()
        file.mkdir()
        answers = {router.client.post(COMPLETIONS, json=BODY).json()["by"] for _ in range(8)}
        assert answers == {"consumer-1"}

    def test_a_drained_engine_is_passed_over_despite_its_prefix(self) -> None:
        engines = engines_up(2)
        group = PrefixGroup(engines)
        holder = group.choose((), group.beginning("x" * 1000))
        assert holder is not None
        assert group.choose((), group.beginning("x" * 1000)) is holder
        holder.drained = True
        assert group.choose((), group.beginning("x" * 1000)) not in (holder, None)


class TestAnEngineThatCameBack:
    @pytest.fixture
    def router(self, start_router: Start) -> Router:
        return start_router()

    def test_a_restarted_engine_first_answers_the_routers_own_request(
        self, router: Router, eventually: Eventually
    ) -> None:
        assert not any(posts(engine) for engine in router.engines), "they were up before it"
        engine = router.consumers[0]
        engine.kill()
        eventually(lambda: router.ready(2, 1))
        assert not httpx.get(f"http://127.0.0.1:{router.port}/readiness", trust_env=False).is_error
        engine.does = stand_in.waits
        engine.start()
        eventually(lambda: posts(engine) == ["warm up"])
        assert router.ready(2, 1), "it gets no request before it answered this one"
        engine.go.set()
        eventually(router.ready)

    def test_a_restarted_engine_is_asked_again_after_a_failure(
        self, router: Router, eventually: Eventually
    ) -> None:
        engine = router.producers[0]
        engine.kill()
        eventually(lambda: router.ready(1, 2))
        engine.does = stand_in.fails
        engine.start()
        eventually(router.ready)
        assert posts(engine) == ["warm up"] * 3

    def test_an_engine_that_was_only_unhealthy_is_not_asked(
        self, router: Router, eventually: Eventually
    ) -> None:
        engine = router.consumers[1]
        engine.healthy = False
        eventually(lambda: router.ready(2, 1))
        engine.healthy = True
        eventually(router.ready)
        assert not posts(engine)


class TestTheSocketThatOutlivesTheRouter:
    """Clients that connect while no router runs wait for the next one."""

    @pytest.fixture
    def listening(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0), backlog=64)

    def start(self, listening: socket.socket, engines: tuple[StandIn, StandIn]) -> subprocess.Popen:
        producer, consumer = engines
        descriptor = listening.fileno()
        return subprocess.Popen(
            (
                sys.executable, "-m", "pdkit_router", "--host", "127.0.0.1", "--port", "1",
                "--metrics-host", "127.0.0.1", "--metrics-port", str(unused_port()),
                "--producer", f"producer-0=127.0.0.1:{producer.port}",
                "--consumer", f"consumer-0=127.0.0.1:{consumer.port}",
            ),
            env={"PYTHONPATH": ROUTER, "PDKIT_LISTEN_FD": str(descriptor)},
            pass_fds=(descriptor,),
        )  # fmt: skip

    @pytest.fixture
    def engines(self, loop: Loop) -> tuple[StandIn, StandIn]:
        return StandIn(loop, "producer-0"), StandIn(loop, "consumer-0")

    def ask(self, port: int) -> str:
        answer = httpx.post(
            f"http://127.0.0.1:{port}{COMPLETIONS}", json=BODY, trust_env=False, timeout=60
        )
        return str(answer.raise_for_status().json()["by"])

    @pytest.mark.parametrize("kill", [subprocess.Popen.kill, subprocess.Popen.terminate])
    def test_clients_that_connect_meanwhile_are_answered_by_the_next_router(
        self,
        listening: socket.socket,
        engines: tuple[StandIn, StandIn],
        kill: Callable[[subprocess.Popen[bytes]], None],
    ) -> None:
        port = listening.getsockname()[1]
        answers: list[str] = []
        with listening:
            first = self.start(listening, engines)
            assert self.ask(port) == "consumer-0"
            kill(first)
            first.wait(20)
            waiting = [
                threading.Thread(target=lambda: answers.append(self.ask(port))) for _ in range(8)
            ]
            for thread in waiting:
                thread.start()
            second = self.start(listening, engines)
            for thread in waiting:
                thread.join(60)
            second.terminate()
            second.wait(20)
        assert answers == ["consumer-0"] * 8

    def test_a_kept_connection_is_closed_before_the_router_ends(
        self, listening: socket.socket, engines: tuple[StandIn, StandIn]
    ) -> None:
        port = listening.getsockname()[1]
        with listening:
            first = self.start(listening, engines)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                assert "connection" not in client.get("/liveness", timeout=60).headers
                first.terminate()
                answer = client.get("/liveness")
                while answer.headers.get("connection") != "close":
                    answer = client.get("/liveness")  # the signal was still on its way
                assert answer.is_success
            assert first.wait(20) == 0
