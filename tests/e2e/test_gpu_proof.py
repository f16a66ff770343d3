"""The short form of scripts/gpu-proof on processors: one stack, and a step that is made to fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.runtime.home import Home
from deploy.workflows.running import require_stack
from tests.conftest import REPO
from tests.e2e.conftest import UP_TIMEOUT_S, Deploy, Ran
from tests.ports import free_row

NAME = "gpu-proof"
STEPS = ("tools", "model", "up", "check", "edges", "long", "path", "redis-killed")


@dataclass(frozen=True)
class Proof:
    """The command, with its state in a folder of the test."""

    state: Path
    port: int
    kit: Deploy

    def run(self, *options: str) -> Ran:
        argv = ("scripts/gpu-proof", "--cpu", "--short", "--state", str(self.state))
        done = subprocess.run(
            (*argv, "--port", str(self.port), *options),
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr, 0)

    def result(self, step: str) -> Any:
        return json.loads((self.state / "results" / f"{step}.json").read_text())

    def stores(self) -> list[redis.Redis]:
        """Return a client of each shard."""
        home = Home(self.kit.home, self.kit.home / "cache")
        shards = require_stack(home, NAME).stack.redis
        password = self.kit.password(NAME)
        return [redis.Redis(unix_socket_path=shard.socket, password=password) for shard in shards]

    @property
    def page(self) -> str:
        return (self.state / "gpu-cpu.md").read_text()


@contextmanager
def taking_nothing(store: redis.Redis) -> Iterator[None]:
    """Have Redis refuse whatever is stored."""
    was = {name: store.config_get(name)[name] for name in ("maxmemory-policy", "maxmemory")}
    store.config_set("maxmemory-policy", "noeviction")
    store.config_set("maxmemory", "1mb")
    try:
        yield
    finally:
        for name, value in reversed(was.items()):
            store.config_set(name, value)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    state = tmp_path_factory.mktemp("proof")
    kit = Deploy(state / "home")
    proof = Proof(state, free_row(), kit)
    yield proof
    assert kit.run("down", "--name", NAME).code == 0
    kit.assert_nothing_left(NAME, proof.port)


def test_every_step_passes(proof: Proof) -> None:
    ran = proof.run("--keep")
    assert ran.code == 0, ran
    assert "**All 8 steps passed.**" in proof.page
    for step in STEPS:
        assert f"| {step} |" in proof.page
    prompts = proof.result("edges")["facts"]["prompts"]
    assert [row["tokens"] for row in prompts] == [510, 511, 512, 513, 514, 515]
    assert [row["loaded"] for row in prompts] == [256, 256, 511, 512, 512, 512]
    assert proof.result("redis-killed")["facts"]["chunks found and not loaded"] > 0
    assert proof.result("path")["facts"]["loaded, GB/s"] > 0


def test_a_store_that_takes_nothing_fails_the_proof(proof: Proof) -> None:
    with ExitStack() as full:
        for store in proof.stores():
            full.enter_context(taking_nothing(store))
        ran = proof.run("--only", "edges", "--keep")
    assert ran.code == 1, ran
    assert "512 tokens: 0 of 511 loaded" in ran.stderr
    assert "**FAILED: edges.**" in proof.page and "0 of 511 loaded" in proof.page


def test_the_next_run_does_only_the_missing_steps(proof: Proof) -> None:
    """And takes the stack down, since nobody asks to keep it."""
    ran = proof.run()
    assert ran.code == 0, ran
    assert ran.stderr.count("done before") == len(STEPS) - 1
    assert "**All 8 steps passed.**" in proof.page
    proof.kit.assert_nothing_left(NAME, proof.port)
