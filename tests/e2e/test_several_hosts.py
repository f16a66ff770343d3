"""Real engines on two hosts: Redis and a producer on one, consumer and router on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from bench.redis_server import RedisServer
from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.runtime.secrets import Secret
from deploy.tiny_model import ensure_tiny_model
from deploy.verify.equivalence import Completion, compare
from tests.e2e.conftest import COMMAND, Deploy, eventually
from tests.e2e.two_networks import Network, two_networks

CHUNK = 256
PROMPT = 4 * CHUNK + 85
KEY = "of-both-hosts-0123456789"
PORT = 8000  # each namespace has all ports
PAUSE_MS = 2000  # far longer than a prefill, and shorter than any deadline of the Redis path


@dataclass(frozen=True)
class Host:
    """A host with a home of its own, and the `deploy` command there."""

    network: Network
    kit: Deploy
    spec: Path
    model: str

    def up(self) -> Any:
        return self.kit.ok("up", "-f", str(self.spec))

    def ask(self, port: int, prompt: list[int]) -> Completion:
        def send() -> Completion:
            url = f"http://{self.network.address if port != PORT else '127.0.0.1'}:{port}"
            with EngineApi(url, api_key=Secret(KEY) if port != PORT else None) as api:
                return api.complete(self.model, prompt, max_tokens=8)

        return self.network.inside(send)


Hosts = tuple[Host, Host, redis.Redis]


@pytest.fixture(scope="module", params=["lmcache", "lmcache-mp"])
def hosts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """Yield the producer's host, the router's, and their Redis."""
    connector: dict[str, Any] = {"connector": request.param}
    if request.param == "lmcache-mp":  # each host has a server, and loads what the other stored
        connector["lmcache"] = {"server_gib": 0.25}
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "key").write_text(KEY)
    with two_networks() as (one, two):
        (folder / "redis-url").write_text(f"redis://{one.address}:6379")
        producer = {"producers": 1, "consumers": 0, **connector}
        worker = _host(folder, one, {"bind": one.address}, **producer)
        url = f"http://{one.address}:{PORT + 10}"
        remote = {"engines": [{"role": "producer", "url": url}]}
        front = _host(folder, two, {}, producers=0, consumers=1, router=remote, **connector)
        options = ("--bind", one.address, "--protected-mode", "no")
        with RedisServer(folder, *options, port=6379, enter=one.enter) as server:
            try:
                yield worker, front, redis.Redis(unix_socket_path=server.socket)
            finally:
                for host in (front, worker):
                    host.kit.run("down")
                    assert host.kit.processes("pdkit") == []


def _host(folder: Path, network: Network, engine: dict[str, str], **part: Any) -> Host:
    home = folder / network.name
    home.mkdir()
    # Each home would make a tiny model of its own, at another path.
    model = ensure_tiny_model(folder / "models")
    fields = {
        "model": str(model),
        # Each host believes that all processors are its own.
        "engine": {"key_file": str(folder / "key"), "env": {"OMP_NUM_THREADS": "1"}, **engine},
        "redis": {"url_file": str(folder / "redis-url")},
        **part,
    }
    spec = home / "deploy.yaml"
    spec.write_text(yaml.safe_dump(fields))
    return Host(network, Deploy(home, command=(*network.enter, COMMAND)), spec, model.name)


def fresh(seed: int) -> list[int]:
    """Return a prompt of the tiny model that no other seed begins like."""
    return [5 + (seed * 7919 + index * 31) % 200 for index in range(PROMPT)]


def test_kv_crosses_hosts_and_a_cut_link_costs_misses_only(hosts: Hosts) -> None:
    worker, front, store = hosts
    worker.up()
    has_server = "kv-server" in front.up()["started"]
    checked = front.kit.ok("check")
    if has_server:
        assert checked["second_tier"]["hits"] == checked["second_tier"]["eligible"] > 0
    assert [pair["eligible_rate"] for pair in checked["pairs"]] == [1.0]
    assert front.ask(PORT, fresh(1)).cached_tokens == 4 * CHUNK
    keys = store.dbsize()
    store.client_pause(PAUSE_MS, all=False)  # it stores nothing until then
    stored = worker.ask(PORT + 10, fresh(2))  # in Redis, which the consumer is about to lose
    assert store.dbsize() >= keys + 4, "the producer answered before Redis had its KV"

    front.network.connect(up=False)
    cut = {seed: front.ask(PORT, fresh(seed)) for seed in (2, 3)}
    assert [answer.cached_tokens for answer in cut.values()] == [0, 0]
    status = front.kit.run("status", "--json")
    assert status.code == 4, status
    states = {one["name"]: one["condition"] for one in status.data["services"]}
    assert (states["producer-0"], states["consumer-0"]) == ("not ready", "ready")

    front.network.connect(up=True)
    seeds = iter(range(4, 200))
    assert eventually(lambda: _hits(front, next(seeds)), every_s=0.5)
    assert front.up()["check"]["passed"]
    for reference, answer in (
        (stored, cut[2]),
        (worker.ask(PORT + 10, fresh(3)), cut[3]),
    ):
        assert compare(reference, answer).matches


def _hits(front: Host, seed: int) -> bool:
    try:
        return front.ask(PORT, fresh(seed)).cached_tokens == 4 * CHUNK
    except ApiError:
        return False
