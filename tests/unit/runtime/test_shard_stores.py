"""A stack's Redis as one store, each a process or in a container, against real servers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

from bench.redis_server import HOST, RedisServer, program
from deploy.runtime.compose.container_store import ContainerStore
from deploy.runtime.redis_client import open_store
from deploy.runtime.secrets import Secret
from deploy.runtime.store import Store, open_shards

PASSWORD = "open-sesame"
MARK = "@pdkit%check-0a1b"
# Marked keys and, on the other server, the twin of each; among them what a shell would take apart.
MARKED = [f"a:{odd}@1@h{n}@bf16{MARK}-{n}-" for n, odd in enumerate(("m", "m/n", 'm "o" $(p)\\x'))]
TWINS = [key.partition(MARK)[0] for key in MARKED]
OTHERS = ["a:m@1@h9@bf16", "a:m@1@h0@bf16@pdkit%check-ffff-1"]

Open = Callable[[], Any]


class Server(RedisServer):
    """One redis-server, as a process and as what a container would run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--requirepass", PASSWORD, "--maxmemory", "64mb")
        self.start()
        self.client = redis.Redis(host=HOST, port=self.port, password=PASSWORD)
        (self.folder / "redis_password").write_text(f"{PASSWORD}\n")
        cli = self.folder / "redis-cli"
        real = Path(program()).with_name("redis-cli")
        cli.write_text(f'#!/bin/sh\nexec {real} -p {self.port} "$@"\n')
        cli.chmod(0o755)

    def as_process(self) -> Any:
        return open_store(self.socket, Secret(PASSWORD))

    def as_container(self) -> Any:
        return nullcontext(ContainerStore(self._run))

    def _run(self, command: Sequence[str]) -> bytes:
        shell, option, script, *asked = command
        done = subprocess.run(
            (shell, option, script.replace("/run/secrets", str(self.folder)), *asked),
            env={"PATH": f"{self.folder}:/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        return done.stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("shards")
    made = [Server(folder), Server(folder)]
    yield made
    for server in made:
        server.client.close()
        server.kill()


@pytest.fixture
def servers(running: list[Server]) -> list[Server]:
    """Two servers with keys, whose twins are on the other one."""
    first, second = running
    for client in (first.client, second.client):
        client.flushall()
        client.config_resetstat()
        for key in OTHERS:
            client.set(key, 1)
    first.client.mset(dict.fromkeys([MARKED[0], *TWINS[1:]], 1))
    second.client.mset(dict.fromkeys([TWINS[0], *MARKED[1:]], 1))
    return running


@pytest.fixture(params=["as_process", "as_container"])
def store(request: pytest.FixtureRequest, servers: list[Server]) -> Iterator[Store]:
    with open_shards([getattr(server, request.param)() for server in servers]) as opened:
        yield opened


def test_keys_are_counted_on_all(store: Store) -> None:
    assert store.refusal() is None
    assert store.count_marked(MARK) == 3
    assert store.count_marked(f"{MARK}-1-") == 1


def test_marked_keys_and_their_twins_are_removed_on_all_shards(
    store: Store, servers: list[Server]
) -> None:
    assert store.remove_marked(MARK) == 6
    for server in servers:
        assert sorted(server.client.keys()) == sorted(key.encode() for key in OTHERS)
    assert store.remove_marked(MARK) == 0


def test_stats_are_summed_over_shards(store: Store, servers: list[Server]) -> None:
    servers[1].client.flushall()
    stats = store.stats()
    assert stats is not None
    assert (stats.keys, stats.max_memory_bytes, stats.flushes) == (5, 128 * 2**20, 1)


def test_the_restart_of_one_shard_is_detected(servers: list[Server], tmp_path: Path) -> None:
    before, after = (_stats(servers), _stats([servers[0], other := Server(tmp_path)]))
    other.client.close()
    other.kill()
    assert after.restarted_since(before)
    assert not _stats(servers).restarted_since(before)


def _stats(servers: list[Server]) -> Any:
    with open_shards([server.as_process() for server in servers]) as store:
        return store.stats()


@pytest.mark.parametrize("kind", ["as_process", "as_container"])
def test_a_dead_shard_makes_the_store_unavailable(
    servers: list[Server], tmp_path: Path, kind: str
) -> None:
    dead = Server(tmp_path)
    dead.kill()
    with open_shards([getattr(one, kind)() for one in (servers[0], dead)]) as store:
        assert store.stats() is None
        assert store.refusal() is None
        assert store.count_marked(MARK) is None
        assert store.remove_marked(MARK) is None
    # What can be removed is.
    assert not servers[0].client.exists(MARKED[0])


def test_the_refusal_of_one_shard_is_reported(servers: list[Server]) -> None:
    shards = [servers[0].as_process(), open_store(servers[1].socket, Secret("wrong"))]
    with open_shards(shards) as store:
        refusal = store.refusal()
        assert refusal is not None
        assert refusal.denied


@pytest.mark.parametrize("kind", ["as_process", "as_container"])
def test_one_shard_has_only_its_own_keys(servers: list[Server], kind: str) -> None:
    with open_shards([getattr(servers[0], kind)()]) as store:
        assert store.count_marked(MARK) == 1
        assert store.remove_marked(MARK) == 1
