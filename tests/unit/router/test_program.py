"""The program as it is started: with a key, an empty one, and engines that are not there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from pdkit_router.__main__ import _emptied, parser

from tests.ports import free_row
from tests.unit.router.conftest import KEY, ROUTER, Router, Start

ENGINE_KEY = "engines-only"
OPEN = ("/health", "/liveness", "/readiness")


@pytest.fixture(scope="module")
def keyed_router(start_router: Start, tmp_path_factory: pytest.TempPathFactory) -> Router:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY + "\n")
    engines = file.with_name("engines")
    engines.write_text(ENGINE_KEY + "\n")
    return start_router("--key-file", str(file), "--engine-key-file", str(engines))


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "0"),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"X-Api-Key": KEY},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/add_worker"])
def test_a_request_without_the_key_reaches_no_engine(
    keyed_router: Router, headers: dict[str, str], path: str
) -> None:
    for engine in keyed_router.engines:
        engine.reset()
    answer = keyed_router.client.post(path, json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 401
    assert "API key" in answer.json()["error"]["message"]
    assert KEY not in answer.text
    assert not any(engine.seen for engine in keyed_router.engines)


def test_a_request_arrives_with_the_engines_key_only(keyed_router: Router) -> None:
    for engine in keyed_router.engines:
        engine.reset()
    assert keyed_router.client.post("/v1/completions", json={}, headers=bearer()).is_success
    seen = [seen for engine in keyed_router.engines for seen in engine.seen]
    assert len(seen) == 2
    assert {one.headers["authorization"] for one in seen} == {f"bearer {ENGINE_KEY}"}


def test_no_key_arrives_if_engines_have_none(router: Router) -> None:
    assert router.client.post("/v1/completions", json={}, headers=bearer()).is_success
    seen = [seen for engine in router.engines for seen in engine.seen]
    assert len(seen) == 2 and not any("authorization" in one.headers for one in seen)


def test_a_key_is_as_good_as_a_known_host(keyed_router: Router) -> None:
    headers = {**bearer(), "Host": "llm.example"}
    assert keyed_router.client.get("/v1/models", headers=headers).is_success


@pytest.mark.parametrize("path", OPEN)
def test_health_needs_no_key(keyed_router: Router, path: str) -> None:
    assert keyed_router.client.get(path).status_code == 200


def test_metrics_have_their_own_port(keyed_router: Router) -> None:
    assert keyed_router.client.get("/metrics", headers=bearer()).status_code == 404
    at = f"http://127.0.0.1:{keyed_router.metrics_port}"
    assert "pdkit_router_requests_total" in httpx.get(f"{at}/metrics", trust_env=False).text
    assert httpx.get(f"{at}/v1/models", trust_env=False).status_code == 404


def run(*options: str) -> subprocess.CompletedProcess[str]:
    where = ("--host", "127.0.0.1", "--port", "1", "--metrics-host", "::1", "--metrics-port", "2")
    return subprocess.run(
        (sys.executable, "-m", "pdkit_router", *where, *options),
        env={"PYTHONPATH": ROUTER},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


ENGINES = ("--producer", "p=127.0.0.1:9", "--consumer", "c=127.0.0.1:9")


@pytest.mark.parametrize("option", ["--key-file", "--engine-key-file"])
def test_an_empty_key_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "key").touch()
    done = run(*ENGINES, option, str(tmp_path / "key"))
    assert done.returncode == 2
    assert "holds no key" in done.stderr


@pytest.mark.parametrize("named", ["c", "c=", "c=host", "=127.0.0.1:9", "c=host:port"])
def test_an_engine_that_cannot_be_reached_by_its_name_is_refused(named: str) -> None:
    done = run("--producer", "p=127.0.0.1:9", "--consumer", named)
    assert done.returncode == 2
    assert f"'{named}' is not NAME=HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--engine", "e=127.0.0.1:9", "--handoff", "direct"), "needs --producer and --consumer"),
        ((*ENGINES, "--handoff", "direct", "--max-handoffs", "0"), "must be at least 1"),
        ((*ENGINES, "--handoff", "pigeon"), "'store', 'direct'"),
    ],
)
def test_a_hand_off_that_cannot_be_is_refused(given: Sequence[str], why: str) -> None:
    done = run(*given)
    assert done.returncode == 2
    assert why in done.stderr


def test_requests_end_before_the_router_does(
    start_router: Start, eventually: Callable[..., None]
) -> None:
    from tests.unit.router import stand_in

    router = start_router()
    for consumer in router.consumers:
        consumer.does = stand_in.waits_between_events
    with router.client.stream("POST", "/v1/completions", json={"stream": True}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == stand_in.EVENTS[0]
        router.process.terminate()

        def refused() -> bool:
            try:
                httpx.get(f"http://127.0.0.1:{router.port}/liveness", trust_env=False)
            except httpx.TransportError as exc:  # another one if accepted just before it closed
                return isinstance(exc, httpx.ConnectError)
            return False

        eventually(refused)
        for consumer in router.consumers:
            consumer.go.set()
        assert b"".join(pieces).endswith(stand_in.DONE)
    eventually(lambda: not router.process.is_running() or router.process.status() == "zombie")


def test_the_router_ends_without_a_traceback(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    port, metrics_port = free_row(), free_row()
    where = ("--host", "127.0.0.1", "--port", str(port))
    metrics = ("--metrics-host", "127.0.0.1", "--metrics-port", str(metrics_port))
    drained = ("--drain-file", str(tmp_path / "drained"))
    with subprocess.Popen(
        (sys.executable, "-m", "pdkit_router", *where, *metrics, *drained, *ENGINES),
        env={"PYTHONPATH": ROUTER},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/liveness", trust_env=False).is_success
            except httpx.TransportError:
                return False

        eventually(answers)
        process.terminate()
        _, told = process.communicate(timeout=20)
    assert process.returncode == 0 and not told, told


class Served:
    """Clients of which one less is busy each time that somebody asks."""

    waiting = False

    def __init__(self, busy: int) -> None:
        self.left = busy

    @property
    def busy(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_the_router_ends_after_its_requests_or_its_time_limit() -> None:
    three, many = Served(3), Served(10**6)
    asyncio.run(_emptied(three, 600))  # type: ignore[arg-type]
    assert three.left == -1
    asyncio.run(_emptied(many, 0))  # type: ignore[arg-type]
    assert many.left == 10**6


def test_how_long_is_an_option() -> None:
    given = ["--host", "h", "--port", "1", "--metrics-host", "h", "--metrics-port", "2"]
    assert parser().parse_args(given).leave_s == 10
    assert parser().parse_args([*given, "--leave-s", "300"]).leave_s == 300
