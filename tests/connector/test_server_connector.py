"""The connector to LMCache's server, without the server: when blocks may be reused, and sockets."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lmcache.integration.vllm import lmcache_mp_connector as upstream
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.platform.devices.cpu import shm as cpu_shm
from own_process import CONNECTOR, last_line
from pdkit_connector import (
    lmcache_server,
    server_connector,
    server_sockets,
    server_stores,
    store_barrier,
)
from pdkit_connector.engine_report import WorkerReport
from pdkit_connector.errors import ConnectorError
from pdkit_connector.serve import SERVER_CONNECTOR, check
from pdkit_connector.server_connector import (
    GuardedAdapter,
    GuardedSchedulerAdapter,
    HealthEvent,
    PatchedLMCacheMPConnector,
    remove_left,
)
from pdkit_connector.server_sockets import MEMORY, REDIS, Server, serve
from pdkit_connector.store_barrier import LATE, STORED, answer
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams

BLOCK, CHUNK = 32, 256


class Transfers:
    """Takes transfers and ends none; a test ends them."""

    def flush_inflight_stores(self):
        pass

    def submit_store(self, *_args, **_named):
        return MessagingFuture()

    submit_retrieve = submit_store


class Op:
    token_ids = (1, 2)
    start, end, skip_first_n_tokens = 0, 2, 0
    flat_block_ids = (7, 8)


HOLD = """
import sys
from pdkit_connector.server_sockets import hold_connections
hold_connections(sys.argv[1])
print(flush=True)
input()
"""


@pytest.fixture
def process(tmp_path):
    """Return a process that holds connections, and does nothing else until it is killed."""
    with holding(str(tmp_path / "requests")) as running:
        yield running


@contextmanager
def holding(requests):
    argv, env = (sys.executable, "-c", HOLD, requests), {"PYTHONPATH": str(CONNECTOR)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, env=env, **pipes) as running:
        assert running.stdout.readline()
        yield running
        running.kill()


@pytest.fixture
def following(tmp_path):
    """Return the server that takes the place of that process."""
    with holding(str(tmp_path / "following")):
        yield Server(str(tmp_path / "following"))


@pytest.fixture
def adapter(tmp_path, process):
    """Return a worker side whose server is that process; nothing is sent anywhere."""
    return worker_side(GuardedAdapter, HealthEvent(), Server(str(tmp_path / "requests")))


@pytest.fixture
def unguarded(tmp_path, process):
    """Return LMCache's own."""
    pinged = threading.Event()
    pinged.set()
    kind = upstream.LMCacheMPWorkerAdapter
    return worker_side(kind, pinged, Server(str(tmp_path / "requests")))


def worker_side(kind, pinged, server):
    one = object.__new__(kind)
    one._server, one._collects = None, False
    one._health_event = pinged
    one._health_event.server = server
    one.lazy_offload = one.dispatcher = None
    one._kv_events_enabled = False
    one.kv_caches, one.blocks_in_chunk, one.transfer_ctx = {}, 1, Transfers()
    one.store_futures, one.retrieve_futures = {}, {}
    one.store_events, one.retrieve_events = {}, {}
    one._pending_store_kv_events, one.error_block_ids = {}, set()
    one._failed_request_ids, one._dropped_retrieves = set(), set()
    one.finished_stores, one.previously_finished, one._returned_finished = set(), set(), set()
    one._create_key = one._block_ids_per_group = lambda *_, **__: None
    one._ensure_heartbeat_started = lambda: None
    one._publish_store_kv_events = lambda _: None
    one.request_telemetry = type("", (), {"on_request_store_finished": lambda *_, **__: None})
    one.model_name = ""
    one.parallel_strategy = type(
        "", (), {"is_kv_writer": True, "kv_world_size": 1, "kv_worker_id": 0}
    )
    return one


def stored(adapter, request):
    adapter.submit_store_request(request, Op, None)
    return adapter.store_futures[request]


def loaded(adapter, request):
    adapter.submit_retrieve_request(request, Op, None)
    return adapter.retrieve_futures[request][0]


def test_a_prompt_of_several_steps_is_stored_with_its_last_step(adapter):
    stored(adapter, "one").set_result(True)
    assert adapter.get_finished(set()) == (set(), set())
    last = stored(adapter, "one")
    assert adapter.get_finished({"one"}) == (set(), set()), "its blocks are being read"
    last.set_result(True)
    assert adapter.get_finished(set()) == ({"one"}, set())


def test_a_slow_server_keeps_the_blocks_that_it_may_touch(adapter):
    store, load = stored(adapter, "one"), loaded(adapter, "two")
    adapter._health_event.clear()  # a ping was not answered in time
    assert adapter.get_finished({"one"}) == (set(), set())
    assert not adapter.error_block_ids
    store.set_result(True)
    load.set_result(True)
    assert adapter.get_finished(set()) == ({"one"}, {"two"})
    assert not adapter.error_block_ids


def preempts(adapter):
    """Have vLLM reuse the blocks of a store; return the thread that makes sure that it may."""
    waiting = threading.Thread(target=adapter.handle_preemptions, args=(True,))
    waiting.start()
    waiting.join(0.5)
    return waiting


def test_blocks_of_a_preempted_request_are_not_reused_while_a_slow_server_reads_them(adapter):
    store = stored(adapter, "one")
    adapter._health_event.clear()
    waiting = preempts(adapter)
    assert waiting.is_alive()
    store.set_result(True)
    waiting.join(20)
    assert not waiting.is_alive()


def test_blocks_of_a_preempted_request_are_reused_if_the_server_ends(adapter, process):
    stored(adapter, "one")
    waiting = preempts(adapter)
    assert waiting.is_alive()
    process.kill()
    waiting.join(20)
    assert not waiting.is_alive()


def test_nothing_more_is_sent_to_a_slow_server(adapter):
    stored(adapter, "one")
    adapter._health_event.clear()
    adapter.submit_retrieve_request("two", Op, None)
    assert not adapter.retrieve_futures
    assert adapter.get_finished(set()) == (set(), {"two"})
    assert adapter.error_block_ids == {7, 8}, "it is computed instead"


@pytest.mark.parametrize("noticed", [True, False])
def test_blocks_are_freed_if_the_server_has_ended(adapter, process, noticed):
    stored(adapter, "one")
    loaded(adapter, "two")
    process.kill()
    process.wait()
    if noticed:
        adapter._health_event.clear()
    assert adapter.get_finished({"one"}) == ({"one"}, {"two"})
    assert adapter.error_block_ids == {7, 8}


def test_nothing_is_sent_until_the_next_server_knows_the_engine(adapter, process, following):
    """A message would wait in the queue, and the next server would act on it unwatched."""
    process.kill()
    process.wait()
    adapter._health_event.set()  # by a ping that the next server answered
    adapter.submit_store_request("one", Op, None)
    adapter.submit_retrieve_request("two", Op, None)
    assert not adapter.store_futures
    assert not adapter.retrieve_futures
    assert adapter.get_finished({"one"})[1] == {"two"}
    adapter._health_event.server = following
    assert stored(adapter, "three")


@pytest.mark.parametrize(
    "needs_the_guard",
    [
        lambda one, *_: test_a_prompt_of_several_steps_is_stored_with_its_last_step(one),
        lambda one, *_: test_a_slow_server_keeps_the_blocks_that_it_may_touch(one),
        lambda one, *_: (
            test_blocks_of_a_preempted_request_are_not_reused_while_a_slow_server_reads_them(one)
        ),
        test_nothing_is_sent_until_the_next_server_knows_the_engine,
    ],
    ids=["several steps", "slow server", "preempted", "next server"],
)
def test_lmcache_itself_gives_blocks_back_too_early(needs_the_guard, unguarded, process, following):
    with pytest.raises(AssertionError):
        needs_the_guard(unguarded, process, following)


def test_transfers_of_the_old_server_are_abandoned_once_the_new_one_knows_the_engine(
    adapter, process, following
):
    loaded(adapter, "one")
    process.kill()
    process.wait()
    adapter._health_event.server = following
    assert adapter.get_finished(set()) == (set(), {"one"})
    assert adapter.error_block_ids == {7, 8}


def test_transfers_go_on_where_no_server_can_be_watched(adapter):
    adapter._health_event.server = None
    store = stored(adapter, "one")
    assert adapter.get_finished({"one"}) == (set(), set())
    store.set_result(True)
    assert adapter.get_finished(set()) == ({"one"}, set())
    adapter._health_event.clear()
    adapter.submit_store_request("two", Op, None)
    assert not adapter.store_futures, "pings still count"


@pytest.fixture
def scheduler(tmp_path, monkeypatch, process):
    """Return a scheduler side whose server is that process, and answers no lookup."""
    monkeypatch.setenv(server_connector.SOCKET_ENV, str(tmp_path / "requests"))
    answers = {"check_lookup_result": lambda *_: None}
    for name in ("__init__", "maybe_submit_lookup_request", "cleanup_lookup_result"):
        answers[name] = lambda *_, **__: None
    for name, answer_of in answers.items():
        monkeypatch.setattr(upstream.LMCacheMPSchedulerAdapter, name, answer_of)
    return GuardedSchedulerAdapter()


def test_a_lookup_is_abandoned_if_its_server_ends(tmp_path, scheduler, process):
    scheduler.maybe_submit_lookup_request("one", [1])
    assert scheduler.check_lookup_result("one") is None
    process.kill()
    process.wait()
    assert scheduler.check_lookup_result("one") == 0
    with holding(str(tmp_path / "requests")):
        scheduler.maybe_submit_lookup_request("one", [1])
        assert scheduler.check_lookup_result("one") == 0, "the next server was not asked"
        scheduler.maybe_submit_lookup_request("two", [1])
        assert scheduler.check_lookup_result("two") is None
        scheduler.cleanup_lookup_result("one")
        assert scheduler._asked.keys() == {"two"}


def test_a_lookup_is_awaited_where_no_server_can_be_watched(scheduler, monkeypatch):
    monkeypatch.delenv(server_connector.SOCKET_ENV)
    scheduler.maybe_submit_lookup_request("one", [1])
    assert scheduler.check_lookup_result("one") is None


def test_the_barrier_waits_for_stores(adapter, monkeypatch):
    monkeypatch.setenv("PDKIT_STORE_BARRIER_S", "0.05")
    store = stored(adapter, "one")
    assert adapter.stores_under_way() == {store}
    assert asyncio.run(answer(adapter.stores_under_way)()) == b"0"
    store.set_result(True)
    assert asyncio.run(answer(adapter.stores_under_way)()) == b"1"


def test_a_server_is_held_until_it_ends(tmp_path, process):
    requests = str(tmp_path / "requests")
    first, second = Server(requests), Server(requests)
    assert not first.ended
    assert not second.ended
    process.kill()
    process.wait()
    assert first.ended
    assert second.ended
    with pytest.raises(ConnectionRefusedError):
        Server(requests)
    with holding(requests):
        assert first.ended, "another one has its place"
        assert not Server(requests).ended


def test_a_stopped_server_has_not_ended(tmp_path, process):
    os.kill(process.pid, signal.SIGSTOP)
    server = Server(str(tmp_path / "requests"))
    assert not server.ended
    process.kill()
    process.wait()
    assert server.ended


class Connecting:
    """Takes three engines, each of which has ended when the next one comes."""

    def __init__(self):
        self.engines, self.taken, self.held = [], [], []

    def accept(self):
        self.held = [one() is not None for one in self.taken]
        if len(self.engines) == 3:
            raise ConnectionAbortedError
        for engine in self.engines:
            engine.close()
        engine, taken = socket.socketpair()
        self.engines.append(engine)
        self.taken.append(weakref.ref(taken))
        return taken, ""


def test_connections_of_ended_engines_are_closed():
    listening = Connecting()
    with pytest.raises(ConnectionAbortedError):
        server_sockets._hold(listening)
    assert listening.held == [False, False, True]
    listening.engines[-1].close()


@pytest.mark.parametrize(
    ("more", "loaded", "stored"),
    [
        ({}, True, True),
        ({"lora_request": object()}, False, False),
        ({"prompt_embeds": object()}, False, False),
        ({"cache_salt": "tenant"}, False, False),
        ({"skip_reading_prefix_cache": True}, False, True),
        ({"sampling_params": SamplingParams(prompt_logprobs=0)}, False, True),
        ({"sampling_params": SamplingParams(logprobs=1)}, True, True),
    ],
)
def test_what_a_request_depends_on_besides_its_tokens_decides_what_is_loaded_and_stored(
    monkeypatch, more, loaded, stored
):
    """Its own KV if that depends on more, every token if its prompt's logprobs are requested."""
    monkeypatch.setattr(
        server_connector.upstream.LMCacheMPConnector,
        "get_num_new_matched_tokens",
        lambda self, request, _: (self._get_or_create_request_tracker(request), 64)[1:],
    )
    scheduler = object.__new__(PatchedLMCacheMPConnector)
    scheduler.request_trackers, scheduler.lazy_offload = {}, False
    request = SimpleNamespace(
        request_id="one", status=None, all_token_ids=[1] * 64, prompt_token_ids=[1] * 64,
        num_prompt_tokens=64, mm_features=[],
        **{"cache_salt": None, "sampling_params": None, **more},
    )  # fmt: skip
    found = scheduler.get_num_new_matched_tokens(request, 0)
    assert found == ((64,) if loaded else (0, False))
    tracker = scheduler.request_trackers["one"]
    tracker.append_block_ids(([1, 2],))
    tracker.increase_num_scheduled_tokens(64)
    store = server_connector.upstream.LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 32, [32])
    assert (store is not None) == stored


def scheduler_of(kind, tokens, **facts):
    """Return a scheduler side that knows one request: its prompt, and what its tracker says."""
    scheduler = object.__new__(kind)
    scheduler.lazy_offload, scheduler._can_store, scheduler._save_decode_cache = False, True, False
    scheduler._group_tokens_per_block = [BLOCK]
    scheduler.scheduler_adapter = SimpleNamespace(
        lmcache_tokens_per_chunk=CHUNK, cleanup_lookup_result=lambda _: None
    )
    request = SimpleNamespace(
        request_id="one", num_computed_tokens=0, loaded=0, all_token_ids=[1] * tokens,
        cache_salt=None, num_prompt_tokens=tokens, sampling_params=None, mm_features=[],
    )  # fmt: skip
    scheduler.request_trackers = {"one": upstream.LMCacheMPRequestTracker(request)}
    for name, value in facts.items():
        setattr(scheduler.request_trackers["one"], name, value)
    return scheduler, request


def stores_of(scheduler, request, steps):
    """Schedule a request in steps, as vLLM does; return which tokens are stored at which step."""
    stores = []
    for number, step in enumerate(steps):
        computed = request.num_computed_tokens
        held = list(range(-(-max(computed + step, request.loaded) // BLOCK)))
        metadata, scheduled = upstream.LMCacheMPConnectorMetadata(), {"one": step}
        if number == 0:
            blocks = SimpleNamespace(get_block_ids=lambda held=held: (held,))
            scheduler.update_state_after_alloc(request, blocks, 0)
            output = SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id="one")], num_scheduled_tokens=scheduled
            )
            scheduler._process_new_requests(output, metadata)
        else:
            known = scheduler.request_trackers["one"].num_allocated_blocks()[0]
            cached = SimpleNamespace(
                req_ids=["one"], resumed_req_ids=set(), new_block_ids=[(held[known:],)]
            )
            output = SimpleNamespace(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
            scheduler._process_cached_requests(output, metadata)
        request.num_computed_tokens = computed + step
        stores += [
            (number, one.op.start, one.op.end, request.num_computed_tokens)
            for one in metadata.requests
        ]
    return stores


@pytest.mark.parametrize("step", [BLOCK, 100, CHUNK, 500, 2000])
def test_a_prompt_is_stored_up_to_its_last_whole_chunk_whatever_its_steps(step):
    """LMCache issue 3640."""
    scheduler, request = scheduler_of(PatchedLMCacheMPConnector, 1100)
    steps = [min(step, 1100 - done) for done in range(0, 1100, step)]
    stores = stores_of(scheduler, request, steps)
    assert [start for _, start, _, _ in stores] == [0, *(end for _, _, end, _ in stores[:-1])]
    assert stores[-1][2] == 4 * CHUNK
    assert all(end <= computed for _, _, end, computed in stores)


@pytest.mark.parametrize(
    ("kind", "uncomputed"),
    [(PatchedLMCacheMPConnector, False), (upstream.LMCacheMPConnector, True)],
)
def test_what_a_failed_load_left_uncomputed_is_not_stored(kind, uncomputed):
    """A chunk of the engine's own, three that do not arrive, and a step that ends in a block."""
    ready = upstream.LMCacheMPRequestState.READY
    loaded = {"num_lmcache_hit_tokens": 4 * CHUNK, "num_stored_tokens": 4 * CHUNK}
    scheduler, request = scheduler_of(kind, 3000, state=ready, num_vllm_hit_tokens=CHUNK, **loaded)
    scheduler.request_trackers["one"].append_block_ids((list(range(4 * CHUNK // BLOCK)),))
    request.num_computed_tokens, request.loaded = CHUNK, 4 * CHUNK
    stores = stores_of(scheduler, request, [2045, 3000 - CHUNK - 2045])
    assert any(end > computed for _, _, end, computed in stores) == uncomputed
    if not uncomputed:
        assert [(start, end) for _, start, end, _ in stores] == [(0, 2048), (2048, 2816)]


def test_only_the_engines_own_shared_memory_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(server_connector, "_SHARED_MEMORY", tmp_path)
    for name in ("pdkit-1-producer-0-77_0", "pdkit-1-producer-01-77_0", "pdkit-2-producer-0-1_0"):
        (tmp_path / name).touch()
    remove_left("pdkit-1-producer-0")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "pdkit-1-producer-01-77_0", "pdkit-2-producer-0-1_0",
    ]  # fmt: skip


def test_a_rank_that_starts_leaves_the_other_ranks_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(server_connector, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(upstream.LMCacheMPConnector, "__init__", lambda *_: None)
    monkeypatch.setattr(server_connector.CpuShmTensorWrapper, "SHM_NAME_PREFIX", "/lmcache-")
    monkeypatch.setattr(upstream, "LMCacheMPWorkerAdapter", upstream.LMCacheMPWorkerAdapter)
    monkeypatch.setattr(upstream, "LMCacheMPSchedulerAdapter", upstream.LMCacheMPSchedulerAdapter)
    monkeypatch.setenv(server_connector.SHARED_MEMORY_ENV, "pdkit-1-producer-0")
    for rank in (0, 1):
        (tmp_path / f"pdkit-1-producer-0-{rank}-77_0").touch()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=1),
        model_config=SimpleNamespace(model="m"),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda _, default: default),
    )
    PatchedLMCacheMPConnector(config, KVConnectorRole.WORKER)
    assert [file.name for file in tmp_path.iterdir()] == ["pdkit-1-producer-0-0-77_0"]
    assert server_connector.CpuShmTensorWrapper.SHM_NAME_PREFIX == "/pdkit-1-producer-0-1-"


def test_the_server_listens_on_sockets_whatever_its_address(tmp_path, monkeypatch):
    from lmcache.v1.multiprocess import http_server
    from lmcache.v1.multiprocess.transport.zmq_impl import server

    bound = []
    monkeypatch.setattr(
        server, "MessageQueueServer", lambda bind_url, context: bound.append((bind_url, context))
    )
    monkeypatch.setattr(http_server.uvicorn, "Config", http_server.uvicorn.Config)
    lmcache_server.listen_on_sockets(str(tmp_path / "requests"), str(tmp_path / "pages"))
    server.MessageQueueServer(bind_url="tcp://0.0.0.0:5555", context=None)
    assert bound == [(f"ipc://{tmp_path}/requests", None)]
    config = http_server.uvicorn.Config(app=None, host="0.0.0.0", port=8080)  # noqa: S104 - not bound
    assert config.uds == str(tmp_path / "pages")


def test_the_servers_host_arguments_cannot_be_resolved():
    argv = lmcache_server.server_argv(("--l1-size-gb", "1"))
    for option in ("--host", "--http-host"):
        host = argv[argv.index(option) + 1]
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(host, 80, flags=socket.AI_NUMERICHOST)


STORES = """
import sys
from lmcache.v1.distributed.l2_adapters import config, factory
from pdkit_connector import lmcache_server

offered = len(factory._PENDING_MODULES)
lmcache_server.import_one_store()
print(offered > 10, config.get_registered_l2_adapter_types(), "transformers" in sys.modules)
"""


def test_of_the_second_tiers_adapters_only_the_plug_in_is_imported():
    assert last_line(STORES) == "True ['plugin'] False"


@pytest.mark.parametrize("address", [None, "127.0.0.1:8005"])
def test_the_server_shows_its_metrics_on_a_port_only_if_configured(monkeypatch, address):
    shown = []
    monkeypatch.setattr(sys, "argv", ["lmcache_server", "requests", "pages"])
    for name in ("hold_connections", "release_ended", "listen_on_sockets", "add_pages"):
        monkeypatch.setattr(lmcache_server, name, lambda *_: None)
    monkeypatch.setattr(lmcache_server, "import_one_store", lambda: None)
    monkeypatch.setattr(server_stores, "answer_engines", lambda _: None)
    monkeypatch.setattr(lmcache_server.runpy, "run_module", lambda *_, **__: None)
    monkeypatch.setattr(lmcache_server.metrics_port, "serve", lambda *given: shown.append(given))
    monkeypatch.delenv("PDKIT_METRICS_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("PDKIT_METRICS_ADDRESS", address)
    lmcache_server.main()
    assert shown == ([(address, "pages")] if address else [])


def test_fixes_of_the_other_connector_are_not_applied(monkeypatch):
    monkeypatch.setattr("pdkit_connector.serve.discover", lambda: 1 / 0)
    check(["--kv-transfer-config", f'{{"kv_connector_module_path": "{SERVER_CONNECTOR}"}}'])


@pytest.fixture
def silent_upstream(monkeypatch):
    monkeypatch.setattr(upstream.LMCacheMPConnector, "register_kv_caches", lambda *_: None)
    monkeypatch.setattr(server_connector, "open_socket", lambda *_: None)


def registered(adapter, **given):
    """Do what the connector does once vLLM has made its KV tensors."""
    adapter.instance_id, adapter.lmcache_tokens_per_chunk = 2**62 + 1, 256
    one = object.__new__(PatchedLMCacheMPConnector)
    one.worker_adapter, one._identity = adapter, {}
    one._vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0),
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config=given),
    )
    one.register_kv_caches({})


def test_an_engine_pings_before_its_first_transfer(adapter, silent_upstream):
    """The server forgets one that never did so, and the engine would not notice."""
    pinging = []
    adapter._ensure_heartbeat_started = lambda: pinging.append(True)
    registered(adapter)
    assert pinging == [True]


def test_an_engine_reports_under_which_number_the_server_knows_it(
    adapter, monkeypatch, silent_upstream
):
    """By it, `deploy check` finds an engine that the server forgot."""
    monkeypatch.setattr(server_connector, "REPORT", WorkerReport())
    registered(adapter, **{"pdkit.namespace": "pdkit:test:1"})
    kv = json.loads(server_connector.REPORT.dump())["kv"]
    assert (kv["instance"], kv["chunk_size"]) == (2**62 + 1, 256)
    assert kv["lmcache"] == importlib.metadata.version("lmcache").partition("+")[0]
    assert kv["namespace"] == "pdkit:test:1"


@pytest.mark.parametrize(
    ("given", "said"), [({}, STORED), ({"pdkit.stored_in": REDIS}, LATE)], ids=str
)
def test_an_answer_waits_for_redis_if_other_hosts_load_from_it(
    adapter, monkeypatch, silent_upstream, tmp_path, given, said
):
    opened = []
    monkeypatch.setattr(server_connector, "open_socket", lambda _, stored: opened.append(stored))
    monkeypatch.setenv(server_connector.SOCKET_ENV, str(tmp_path / "kv"))
    monkeypatch.setenv(store_barrier.DEADLINE_ENV, "0.3")

    async def wait(where, *_):
        return where == MEMORY

    serve(str(tmp_path / "kv"), wait)
    registered(adapter, **given)
    assert asyncio.run(opened[0]()) == said


def test_a_process_with_a_wrong_number_cannot_share_gpu_memory(monkeypatch):
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", f"{os.getpid() + 1}-{os.getpid() + 9}")
    with pytest.raises(ConnectorError, match="cannot share GPU memory"):
        object.__new__(PatchedLMCacheMPConnector).register_kv_caches({})
    monkeypatch.setattr(sys, "argv", ["lmcache_server", "/nowhere/requests", "/nowhere/pages"])
    with pytest.raises(ConnectorError, match="cannot share GPU memory"):
        lmcache_server.main()


@pytest.mark.parametrize("mode", ["lmcache_driven", "auto"])
def test_an_engine_that_cannot_share_its_memory_does_not_fall_back_to_pickle(monkeypatch, mode):
    """Without the mode that the kit sets, LMCache chooses pickle for CPUs by itself."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Client:
        sent = ()

        def __getattr__(self, name):
            def send(*_arguments, **_options):
                self.sent = (*self.sent, name)
                raise StopAsyncIteration  # no server

            return send

    monkeypatch.setattr(cpu_shm, "shm_create_readwrite", full)
    client, kv = Client(), {"layer": torch.zeros(2, 4, 16)}
    context = create_transfer_context(kv, instance_id=1, req_client=client, mode=mode)
    with pytest.raises(OSError if mode == "lmcache_driven" else StopAsyncIteration):
        context.register(kv, "model", 1, 1, 1.0)
    assert bool(client.sent) is (mode == "auto")
