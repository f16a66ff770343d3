"""A real stack for the benchmark, and beside it a producer without the barrier."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
import yaml

from bench.redis_path import wide_model
from bench.redis_path.rounds import ROOT, Say
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home, StackHome
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
        seen = -1
        while seen != (now := int(self.store.dbsize())):
            seen = now
            time.sleep(0.3)
        self.store.flushall()


def prompt(tokens: int, seed: int) -> list[int]:
    """Return tokens that another seed does not give."""
    return random.Random(seed).choices(range(32, 127), k=tokens)  # noqa: S311 - not for secrets


@contextlib.contextmanager
def running_stack(say: Say) -> Iterator[Running]:
    """Start a stack of the wide model and a second producer; end them with the context."""
    with wide_stack(say) as (files, port):
        password = (files.secrets_dir / "redis_password").read_text(encoding="utf-8").strip()
        state = json.loads(files.state_file.read_text(encoding="utf-8"))
        producer, consumer = engines(files, port)
        pid = state["services"]["producer-0"]["pid"]
        with _unheld(pid, port + 19, producer.key, say) as unheld:
            socket = str(files.temp_dir / "redis.sock")
            store = redis.Redis(unix_socket_path=socket, password=password)
            yield Running(producer, consumer, unheld, store)


@contextlib.contextmanager
def wide_stack(
    say: Say, *, positions: int = wide_model.POSITIONS, **changes: object
) -> Iterator[tuple[StackHome, int]]:
    """Start a stack of the wide model, and end it with the context; its files and first port."""
    with tempfile.TemporaryDirectory(prefix="pdkit-bench-") as name:
        folder = Path(name)
        say("making a model")
        model = wide_model.make(folder, positions=positions)
        port = free_ports()
        spec = {**_SPEC, "model": str(model), "port": port, **changes}
        (folder / "stack.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
        try:
            say("starting a stack")
            deploy_command(folder, "up", "-f", str(folder / "stack.yaml"), "--no-check")
            yield Home(folder, folder).stack(STACK), port
        finally:
            deploy_command(folder, "down", "--name", STACK)


def engines(files: StackHome, port: int) -> tuple[Engine, Engine]:
    """Return the producer and the consumer of a stack."""
    key = engine_key(files)
    producer, consumer = (Engine(f"http://127.0.0.1:{port + n}", key) for n in (10, 11))
    return producer, consumer


def engine_key(files: StackHome) -> Secret:
    """Return the key that a stack's engines ask for."""
    return read_secrets(files.secrets_dir, (ENGINE_KEY,))[ENGINE_KEY]


def deploy_command(folder: Path, *arguments: str) -> None:
    argv = (sys.executable, "-m", "deploy", *arguments)
    environ = {**os.environ, "PDKIT_HOME": str(folder), "PDKIT_SUPERVISE": "false"}
    subprocess.run(argv, env=environ, cwd=ROOT, check=True, timeout=_UP_S, stdout=2)


@contextlib.contextmanager
def _unheld(pid: int, port: int, key: Secret, say: Say) -> Iterator[Engine]:
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


def free_ports() -> int:
    for base in range(29000, 32000, 100):
        taken = {c.laddr.port for c in psutil.net_connections("tcp") if c.laddr}
        if not taken & set(range(base, base + 20)):
            return base
    raise RuntimeError("no free ports")
