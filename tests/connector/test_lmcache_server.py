"""LMCache's worker side and its server, which is replaced faster than an engine pings it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    HeartbeatThread,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper
from own_process import CONNECTOR
from pdkit_connector.server_connector import (
    SOCKET_ENV,
    GuardedAdapter,
    GuardedSchedulerAdapter,
    PatchedLMCacheMPConnector,
)
from pdkit_connector.server_sockets import MEMORY, stored_by_server
from redis_servers import eventually

STARTS_WITHIN_S = 120.0
BLOCK, LAYERS = 16, 2
PROGRAM = ("-m", "pdkit_connector.lmcache_server")
# A server that notes what was written once a minute, where LMCache does every five milliseconds.
FORGETFUL = """
from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher
DeviceHostFuncDispatcher.__init__.__defaults__ = (60.0,)
from pdkit_connector.lmcache_server import main
main()
"""


# A server that copies KV as LMCache does.
STAGED = """
from pdkit_connector import lmcache_server
lmcache_server.copy_once = lambda: None
lmcache_server.main()
"""
# A server in which lookups take ten seconds, where one second is too long.
HANGING = """
import functools, time
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from pdkit_connector import lmcache_server
lmcache_server.HUNG_AFTER_S = 1.0
lookup = LookupModule.lookup
@functools.wraps(lookup)
def hang(*args):
    time.sleep(10)
    return lookup(*args)
LookupModule.lookup = hang
lmcache_server.main()
"""
NUMBERS = itertools.count()


class Sockets:
    """Where the servers of a test listen, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.requests, self.pages = str(folder / "requests"), str(folder / "pages")

    @contextmanager
    def served(self, *program: str) -> Iterator[None]:
        """Run a server, which is killed at the end."""
        argv = (
            sys.executable, *program, self.requests, self.pages,
            "--l1-size-gb", "0.01", "--eviction-policy", "LRU", "--chunk-size", str(BLOCK),
            "--supported-transfer-mode", "lmcache_driven",
        )  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(CONNECTOR), "LMCACHE_TRACK_USAGE": "false"}
        with subprocess.Popen(argv, env=env) as server:
            try:
                eventually(lambda: self._answers(server), STARTS_WITHIN_S)
                self.pid = server.pid
                yield
            finally:
                server.kill()

    def known(self) -> list[int]:
        """Return the engines that the server knows."""
        return self.status()["registered_gpu_ids"]

    def status(self) -> dict[str, Any]:
        """Return what the server reports about itself."""
        return json.loads(self._get("/status"))

    def health(self) -> tuple[int, str]:
        """Return what its health check answers."""
        answer = self._answer("/healthcheck")
        return answer.status_code, answer.json()["status"]

    def mapped(self) -> int:
        """Return how many pieces of engines' memory it has mapped."""
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sum(CpuShmTensorWrapper.SHM_NAME_PREFIX in line for line in maps)

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        assert server.poll() is None
        try:
            return bool(self._get("/healthcheck"))
        except httpx.TransportError:
            return False

    def _get(self, page: str) -> str:
        return self._answer(page).raise_for_status().text

    def _answer(self, page: str) -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=self.pages), timeout=20) as client:
            return client.get(f"http://localhost{page}")


@pytest.fixture(autouse=True)
def no_pings(monkeypatch):
    """Let the test itself send what an engine's thread would."""
    monkeypatch.setattr(HeartbeatThread, "start", lambda _: None)


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    """Return sockets for servers of the test's own."""
    found = Sockets(tmp_path)
    monkeypatch.setenv(SOCKET_ENV, found.requests)
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Yield the sockets of a server as the kit starts it, which takes seconds of imports."""
    found = Sockets(tmp_path_factory.mktemp("server"))
    with found.served(*PROGRAM):
        yield found


@pytest.fixture
def server(running, monkeypatch):
    """Return the sockets of the server that several tests share, in the order of this file."""
    monkeypatch.setenv(SOCKET_ENV, running.requests)
    return running


def adapter_of(kind, address):
    return kind(
        address, zmq.Context.instance(), "models/tiny", BLOCK,
        ParallelStrategy(False, 1, 0, 1, 1, 1),
        extra_config={"lmcache.mp.mp_transfer_mode": "lmcache_driven"},
    )  # fmt: skip


def registered(sockets, shape=(2, 4, BLOCK, 2, 8), layout="NHD"):
    """Return an engine's worker side, of whose KV the server was told."""
    adapter = adapter_of(GuardedAdapter, f"ipc://{sockets.requests}")
    kv = {f"layer.{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(LAYERS)}
    groups = [EngineGroupInfo(0, tuple(range(LAYERS)), BLOCK)]
    adapter.register_kv_caches(kv, groups, {"kv_layout": layout})
    adapter._ensure_heartbeat_started()
    return adapter


def test_a_replaced_server_is_told_of_the_engine_at_the_next_ping(sockets):
    with sockets.served(*PROGRAM):
        adapter = registered(sockets)
        adapter._heartbeat._execute()
        assert sockets.known() == [adapter.instance_id]
        assert adapter.is_healthy
    assert not adapter.is_healthy, "before any ping failed"
    with sockets.served(*PROGRAM):
        assert sockets.known() == []
        assert not adapter.is_healthy, "the new server does not know its memory"
        adapter._heartbeat._execute()
        assert sockets.known() == [adapter.instance_id]
        assert adapter.is_healthy
        adapter._heartbeat._execute()
        assert adapter.is_healthy
        assert sockets.mapped() == LAYERS
        adapter.shutdown()
        eventually(lambda: not sockets.mapped(), 20)


def test_lookups_of_ended_requests_are_forgotten(server):
    worker = registered(server)
    asking = adapter_of(GuardedSchedulerAdapter, [f"ipc://{server.requests}"])
    for name in ("ended", "waits"):
        asking.maybe_submit_lookup_request(name, list(range(4 * BLOCK)))
    asking.end_session("ended")  # before anybody asked for the result
    eventually(lambda: left(server) == (1, 1), 20)
    eventually(lambda: asking.check_lookup_result("waits") == 0, 20)
    asking.end_session("waits")
    eventually(lambda: left(server) == (0, 0), 20)
    worker.shutdown()


def test_kv_counts_as_stored_when_other_engines_find_it(sockets):
    tokens = list(range(3 * BLOCK))
    with sockets.served("-c", FORGETFUL):
        worker = registered(sockets)
        asking = adapter_of(GuardedSchedulerAdapter, [f"ipc://{sockets.requests}"])
        worker._heartbeat._execute()
        op = LoadStoreOp(tokens, [[1, 2, 3]], 0, len(tokens))
        worker.submit_store_request("stores", op, worker.create_recorded_event())
        eventually(lambda: not worker.stores_under_way(), 20)
        assert found(asking, "before", tokens) == 0, "its blocks were read, and that is all"
        assert asyncio.run(stored_by_server(sockets.requests, MEMORY, lambda: True, 20))
        assert found(asking, "after", tokens) == len(tokens)
        worker.shutdown()


def test_kv_comes_back_into_other_blocks(server):
    """By the kit's copies."""
    comes_back(server)


def test_kv_comes_back_by_lmcaches_own_copies(sockets):
    with sockets.served("-c", STAGED):
        comes_back(sockets)


def comes_back(sockets):
    """Store KV as vLLM keeps it on CPUs, and load it into other blocks."""
    tokens = list(range(3 * BLOCK))
    worker = registered(sockets, (8, 2, BLOCK, 16), "HND")
    asking = adapter_of(GuardedSchedulerAdapter, [f"ipc://{sockets.requests}"])
    worker._heartbeat._execute()
    for layer in worker.kv_caches.values():
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in worker.kv_caches.values()]
    stored = LoadStoreOp(tokens, [[3, 1, 2]], 0, len(tokens))
    worker.submit_store_request("stores", stored, worker.create_recorded_event())
    eventually(lambda: not worker.stores_under_way(), 20)
    eventually(lambda: found(asking, f"looks {next(NUMBERS)}", tokens) == len(tokens), 20)
    loads = LoadStoreOp(tokens, [[5, 6, 0]], 0, len(tokens), skip_first_n_tokens=BLOCK)
    assert found(asking, "loads", tokens) == len(tokens)
    worker.submit_retrieve_request("loads", loads, worker.create_recorded_event())
    eventually(lambda: worker.get_finished(set())[1] == {"loads"}, 20)
    assert not worker.get_block_ids_with_load_errors()
    for old, new in zip(before, worker.kv_caches.values(), strict=True):
        wanted = old.clone()
        wanted[6], wanted[0] = old[1], old[2]  # the first block is one that others read
        assert torch.equal(new, wanted)
    worker.shutdown()


def found(asking, request, tokens):
    """Return how many tokens of a prompt an engine finds."""
    results = []

    def answered():
        results.append(asking.check_lookup_result(request))
        return results[-1] is not None

    asking.maybe_submit_lookup_request(request, tokens)
    eventually(answered, 20)
    return results[-1]


def test_what_a_request_found_is_unlocked_when_it_ends_before_it_loads(server):
    """Else the server could not evict it for five minutes."""
    tokens, before = list(range(100, 100 + 3 * BLOCK)), locked(server)
    worker = registered(server, (8, 2, BLOCK, 16), "HND")
    asking = adapter_of(GuardedSchedulerAdapter, [f"ipc://{server.requests}"])
    connector = object.__new__(PatchedLMCacheMPConnector)
    connector.scheduler_adapter, connector._awaited_stores = asking, set()
    connector.request_trackers, connector.lazy_offload, connector._can_store = {}, False, True
    worker._heartbeat._execute()
    stored = LoadStoreOp(tokens, [[3, 1, 2]], 0, len(tokens))
    worker.submit_store_request("stores more", stored, worker.create_recorded_event())
    eventually(lambda: not worker.stores_under_way(), 20)

    def ends(name):
        connector.request_finished(SimpleNamespace(request_id=name, kv_transfer_params=None), [])

    def finds_and_ends():
        name = f"looks {next(NUMBERS)}"
        whole = found(asking, name, tokens) == len(tokens)
        assert locked(server) == before + 3 * whole
        ends(name)
        eventually(lambda: locked(server) == before, 20)
        return whole

    eventually(finds_and_ends, 20)
    asking.maybe_submit_lookup_request("ends at once", tokens)
    ends("ends at once")
    eventually(lambda: left(server) == (0, 0) and locked(server) == before, 20)
    worker.shutdown()


def locked(sockets):
    """Return how many chunks the server must not evict, as somebody is about to read them."""
    (memory,) = sockets.status()["storage_manager"]["l1_managers"].values()
    return memory["read_locked_count"]


def test_the_script_api_is_disabled(server):
    transport = httpx.HTTPTransport(uds=server.pages)
    with httpx.Client(transport=transport, timeout=20) as client:
        script = {"script": ("s.py", "result = 6 * 7")}
        answer = client.post("http://localhost/run_script", files=script)
    assert answer.status_code == 404
    assert answer.text.startswith("The /run_script API is disabled")


def test_a_server_whose_requests_hang_says_so_until_they_are_answered(sockets):
    with sockets.served("-c", HANGING):
        worker = registered(sockets)
        asking = adapter_of(GuardedSchedulerAdapter, [f"ipc://{sockets.requests}"])
        assert sockets.health() == (200, "healthy")
        asking.maybe_submit_lookup_request("hangs", list(range(4 * BLOCK)))
        eventually(lambda: sockets.health() == (503, "unhealthy"), 20)
        eventually(lambda: sockets.health() == (200, "healthy"), 30)
        worker.shutdown()


def test_a_server_whose_thread_for_requests_has_died_says_so(server):
    """The last test of this server."""
    asking = zmq.Context.instance().socket(zmq.DEALER)
    asking.connect(f"ipc://{server.requests}")
    asking.send(b"of one part, where LMCache asserts that there are more")
    eventually(lambda: server.health() == (503, "unhealthy"), 20)
    asking.close(0)


def left(sockets):
    """Return how many lookups the server has, and how many results of lookups."""
    told = sockets.status()
    controller = told["storage_manager"]["prefetch_controller"]
    return told["active_prefetch_jobs"], controller["completed_results_count"]
