"""The router as a process, before two producers and two consumers that do what tests tell them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.ports import unused_port
from tests.unit.router.stand_in import Loop, StandIn

DISAGGREGATED = ("producer-0", "producer-1", "consumer-0", "consumer-1")
KEY = "0123456789abcdef" * 4
ROUTER = str(Path(__file__).resolve().parents[3] / "deploy" / "router")
sys.path.insert(0, ROUTER)

from pdkit_router.upstream import Engine  # noqa: E402 - it is found from here on


def engines_up(count: int) -> list[Engine]:
    """Return engines that answer, as far as the router knows."""
    made = [Engine(str(number), "127.0.0.1", 9) for number in range(count)]
    for engine in made:
        engine.state = "up"
    return made


@dataclass
class Router:
    """A router that runs, and its engines."""

    client: httpx.Client
    port: int
    metrics_port: int
    engines: tuple[StandIn, ...]
    process: psutil.Process

    @property
    def producers(self) -> tuple[StandIn, ...]:
        return tuple(one for one in self.engines if one.name.startswith("producer"))

    @property
    def consumers(self) -> tuple[StandIn, ...]:
        return tuple(one for one in self.engines if one.name.startswith("consumer"))

    def ready(self, producers: int = 2, consumers: int = 2) -> bool:
        try:
            said = self.client.get("/readiness").json()
        except httpx.HTTPError:
            return False
        found = (said["prefill"]["healthy"], said["decode"]["healthy"])
        return found == (producers, consumers)

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False).text

    def count(self, name: str) -> int:
        lines = self.metrics().splitlines()
        (line,) = [line for line in lines if line.startswith(f"pdkit_router_{name}")]
        return int(line.rpartition(" ")[2])


def forget_peak(router: Router) -> None:
    Path(f"/proc/{router.process.pid}/clear_refs").write_text("5")


def peak(router: Router) -> int:
    """Return the most bytes of memory that the router has had since that was forgotten."""
    (line,) = re.findall(
        r"VmHWM:\s+(\d+) kB", Path(f"/proc/{router.process.pid}/status").read_text()
    )
    return int(line) * 1024


Start = Callable[..., Router]


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def start_router(loop: Loop, eventually: Callable[..., None]) -> Iterator[Start]:
    """Start routers, each with engines of its own, and end them."""
    ended: list[Callable[[], object]] = []

    def start(
        *options: str,
        names: Sequence[str] = DISAGGREGATED,
        expected: tuple[int, int] | None = None,
        models: bytes = StandIn.models,
    ) -> Router:
        engines = tuple(StandIn(loop, name, models=models) for name in names)
        port, metrics = unused_port(), unused_port()
        named = [
            part
            for engine in engines
            for part in (f"--{engine.name[:-2]}", f"{engine.name}=127.0.0.1:{engine.port}")
        ]
        process = subprocess.Popen(
            (
                sys.executable, "-m", "pdkit_router", "--host", "127.0.0.1", "--port", str(port),
                "--metrics-host", "127.0.0.1", "--metrics-port", str(metrics), *named, *options,
            ),
            env={"PYTHONPATH": ROUTER},
        )  # fmt: skip
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)
        ended.extend((client.close, process.terminate, lambda: process.wait(20)))
        router = Router(client, port, metrics, engines, psutil.Process(process.pid))
        producers = len(router.producers)
        up = expected or (producers, len(engines) - producers)
        eventually(lambda: router.ready(*up))
        return router

    yield start
    for end in ended:
        end()


@pytest.fixture(scope="module")
def one_router(start_router: Start) -> Router:
    return start_router()


@pytest.fixture
def router(one_router: Router, eventually: Callable[..., None]) -> Iterator[Router]:
    """The router with all engines there and nothing told to them yet."""
    for engine in one_router.engines:
        engine.reset()
    eventually(one_router.ready)
    yield one_router
    for engine in one_router.engines:
        engine.go.set()
