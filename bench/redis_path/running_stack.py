"""A real stack for the benchmark, and beside it a producer without the barrier."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from bench.kit import free_ports, say, started, store_of
from bench.redis_path import wide_model
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import StackHome
from deploy.runtime.secrets import Secret, read_secrets
from deploy.stack.layout import ENGINE_KEY
from deploy.verify.equivalence import Completion
from deploy.verify.store_path import StorePath

STACK = "bench"
_UP_S, _ASK_S = 900, 300
_ANSWER = 8  # tokens
_SPEC = {
    "name": STACK, "vendor": "cpu", "runtime": "process", "topology": "1p1d",
    "engine": {"kv_cache_gib": 1},
    "lmcache": {"staging_gib": 1},
    "redis": {"memory_gib": 2},
}  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """An engine's API; prompts are random tokens, so that no two share a chunk."""

    url: str
    key: Secret

    def ask(self, prompt: list[int]) -> float:
        """Return the seconds to the first token."""
        with EngineApi(self.url, timeout_s=_ASK_S, api_key=self.key) as api:
            began = time.perf_counter()
            api.complete(wide_model.NAME, prompt, max_tokens=1)
            return time.perf_counter() - began

    def answer(self, prompt: list[int], timeout_s: float) -> Completion:
        """Return a few tokens and what was as likely."""
        with EngineApi(self.url, timeout_s=timeout_s, api_key=self.key) as api:
            return api.complete(wide_model.NAME, prompt, max_tokens=_ANSWER)

    def store_path(self) -> StorePath:
        """Return what was moved to and from Redis so far."""
        with EngineApi(self.url, timeout_s=_ASK_S, api_key=self.key) as api:
            return api.store_path() or StorePath()

    def hits(self) -> int:
        """Return the tokens that were loaded so far."""
        with EngineApi(self.url, timeout_s=_ASK_S, api_key=self.key) as api:
            return int(api.cache_counters().external_hits)


@dataclass(frozen=True)
class Running:
    """The engines, and their store."""

    producer: Engine
    consumer: Engine
    unheld: Engine
    store: redis.Redis

    def drain(self) -> None:
        """Wait until nothing more is stored, and empty the store."""
        await_stored(self.store)
        self.store.flushall()


def await_stored(store: redis.Redis) -> None:
    """Wait until no more keys come to a store."""
    seen = -1
    while seen != (now := int(store.dbsize())):
        seen = now
        time.sleep(0.5)


def prompt(tokens: int, seed: int) -> list[int]:
    """Return tokens that another seed does not give."""
    return random.Random(seed).choices(range(32, 127), k=tokens)  # noqa: S311 - not for secrets


@contextlib.contextmanager
def running_stack() -> Iterator[Running]:
    """Start a stack of the wide model and a second producer; end them with the context."""
    with wide_stack() as (files, port):
        state = json.loads(files.state_file.read_text(encoding="utf-8"))
        producer, consumer = engines(files, port)
        pid = state["services"]["producer-0"]["pid"]
        with _unheld(pid, port + 19, producer.key) as unheld:
            yield Running(producer, consumer, unheld, store_of(files))


@contextlib.contextmanager
def wide_stack(
    *, positions: int = wide_model.POSITIONS, **changes: object
) -> Iterator[tuple[StackHome, int]]:
    """Start a stack of the wide model, and end it with the context; its files and first port."""
    with (
        folder_with_model(positions) as (folder, model),
        stack_in(folder, model, **changes) as made,
    ):
        yield made


@contextlib.contextmanager
def folder_with_model(positions: int = wide_model.POSITIONS) -> Iterator[tuple[Path, Path]]:
    """Make a folder for stacks, and in it the wide model; both are gone after the context."""
    with tempfile.TemporaryDirectory(prefix="pdkit-bench-") as name:
        say("making a model")
        yield Path(name), wide_model.make(Path(name), positions=positions)


@contextlib.contextmanager
def stack_in(folder: Path, model: Path, **changes: object) -> Iterator[tuple[StackHome, int]]:
    """Start a stack of a model, and end it with the context; its files and first port."""
    port = free_ports()
    with started(folder, {**_SPEC, "model": str(model), "port": port, **changes}) as files:
        yield files, port


def engines(files: StackHome, port: int) -> tuple[Engine, Engine]:
    """Return the producer and the consumer of a stack."""
    key = read_secrets(files.secrets_dir, (ENGINE_KEY,))[ENGINE_KEY]
    producer, consumer = (Engine(f"http://127.0.0.1:{port + n}", key) for n in (10, 11))
    return producer, consumer


@contextlib.contextmanager
def _unheld(pid: int, port: int, key: Secret) -> Iterator[Engine]:
    """Start what the producer is once more, with answers that wait for nothing."""
    say("starting a producer without the barrier")
    like = psutil.Process(pid)
    argv = like.cmdline()
    at = argv.index("--port") + 1
    argv[at] = str(port)
    environ = like.environ()
    environ["PDKIT_STORE_BARRIER_S"] = "0"
    environ["PDKIT_ENGINE_SOCKET"] += "-unheld"
    process = subprocess.Popen(
        argv, env=environ, cwd=like.cwd(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _await_ready(url, process)
        yield Engine(url, key)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.terminate()
        process.terminate()
        process.wait(60)


def _await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _UP_S
    with EngineApi(url) as api:
        while not api.is_healthy():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the second producer does not start")
            time.sleep(0.5)
