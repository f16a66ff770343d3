"""LMCache's worker side and its server, which is replaced faster than an engine pings it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import HeartbeatThread, ParallelStrategy
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from pdkit_connector.mp_connector import SOCKET_ENV, GuardedAdapter
from redis_servers import eventually

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"
STARTS_WITHIN_S = 120.0
BLOCK = 16


class Sockets:
    """Where the servers of a test listen, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.requests, self.pages = str(folder / "requests"), str(folder / "pages")

    @contextmanager
    def served(self) -> Iterator[None]:
        """Run a server, which is killed at the end."""
        argv = (
            sys.executable, "-m", "pdkit_connector.kv_server", self.requests, self.pages,
            "--l1-size-gb", "0.01", "--eviction-policy", "LRU", "--chunk-size", str(BLOCK),
            "--supported-transfer-mode", "lmcache_driven",
        )  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(CONNECTOR), "LMCACHE_TRACK_USAGE": "false"}
        with subprocess.Popen(argv, env=env) as server:
            try:
                eventually(lambda: self._answers(server), STARTS_WITHIN_S)
                yield
            finally:
                server.kill()

    def known(self) -> list[int]:
        """Return the engines that the server knows."""
        return json.loads(self._get("/status"))["registered_gpu_ids"]

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        assert server.poll() is None
        try:
            return bool(self._get("/healthcheck"))
        except httpx.TransportError:
            return False

    def _get(self, page: str) -> str:
        with httpx.Client(transport=httpx.HTTPTransport(uds=self.pages), timeout=20) as client:
            return client.get(f"http://localhost{page}").raise_for_status().text


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    """Return the sockets; the test itself sends what an engine's thread would ping."""
    found = Sockets(tmp_path)
    monkeypatch.setenv(SOCKET_ENV, found.requests)
    monkeypatch.setattr(HeartbeatThread, "start", lambda _: None)
    return found


def registered(sockets):
    """Return an engine's worker side, of whose KV the server was told."""
    adapter = GuardedAdapter(
        f"ipc://{sockets.requests}", zmq.Context.instance(), "models/tiny", BLOCK,
        ParallelStrategy(False, 1, 0, 1, 1, 1),
        extra_config={"lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    )  # fmt: skip
    kv = {f"layer.{n}": torch.zeros((2, 4, BLOCK, 2, 8), dtype=torch.bfloat16) for n in range(2)}
    groups = [EngineGroupInfo(0, (0, 1), BLOCK)]
    adapter.register_kv_caches(kv, groups, {"kv_layout": "NHD"})
    adapter._ensure_heartbeat_started()
    return adapter


def test_a_server_that_was_replaced_between_two_pings_is_told_of_the_engine(sockets):
    with sockets.served():
        adapter = registered(sockets)
        adapter._heartbeat._execute()
        assert sockets.known() == [adapter.instance_id]
        assert adapter.is_healthy
    assert not adapter.is_healthy, "before any ping failed"
    with sockets.served():
        assert sockets.known() == []
        assert not adapter.is_healthy, "the new server does not know its memory"
        adapter._heartbeat._execute()
        assert sockets.known() == [adapter.instance_id]
        assert adapter.is_healthy
        adapter._heartbeat._execute()
        assert adapter.is_healthy
        adapter.shutdown()
