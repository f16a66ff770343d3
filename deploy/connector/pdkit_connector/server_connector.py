"""The connector to LMCache's server: `kv_connector_module_path: pdkit_connector.server_connector`.

LMCache's own `LMCacheMPConnector`, with nine things added: the store barrier; a guard that keeps
blocks that the server may still read or write from being reused; one that frees the blocks of an
aborted request exactly once, after its load; one that keeps KV apart that tokens alone
do not distinguish; one that stores nothing that a failed load left uncomputed; pings
from the start on; registration with a server that replaced the old one between two pings; names of
shared memory by which what a killed engine left can be found; and a clock of its share of steps.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lmcache.integration.vllm import lmcache_mp_connector as upstream
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pdkit_connector.engine_report import REPORT
from pdkit_connector.identity.kv_identity import identified
from pdkit_connector.log import get_logger
from pdkit_connector.metrics import open_socket
from pdkit_connector.process_numbers import require_own_number
from pdkit_connector.redis_path.value import object_layout
from pdkit_connector.releases import installed_lmcache, installed_vllm
from pdkit_connector.request_view import foreign, is_computed_whole
from pdkit_connector.server_sockets import MEMORY, Server, stored_by_server
from pdkit_connector.step_clock import timed_steps
from pdkit_connector.store_barrier import answer

SOCKET_ENV = "PDKIT_KV_SERVER_SOCKET"
SHARED_MEMORY_ENV = "PDKIT_SHARED_MEMORY"
# How often a worker that waits for a store looks whether the server has ended.
_POLL_S = 0.2
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is


def listening_server() -> Server | None:
    """Return the server that listens for requests; None where it cannot be held."""
    with suppress(OSError):
        return Server(os.environ.get(SOCKET_ENV, ""))
    return None


class HealthEvent(threading.Event):
    """Set while pings are answered, by the server that knows this engine's KV.

    LMCache registers KV again if this was not set before a ping that is answered. A server that is
    replaced between two pings fails none of them, and would never be told of the engine.

    Attributes:
        server: with which KV was registered last; None where it cannot be held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server: Server | None = None
        self.set()

    def is_set(self) -> bool:
        """Tell whether the server takes transfers of this engine."""
        return super().is_set() and not (self.server and self.server.ended)


class GuardedAdapter(upstream.LMCacheMPWorkerAdapter):  # type: ignore[misc]
    """LMCache's worker side, which gives no block back that the server may still touch.

    The server reads and writes the engine's own KV memory. LMCache gives all transfers up once a
    ping was not answered in time, so that vLLM reuses their blocks; a server that was only slow
    goes on with them, and writes into another request's KV, or stores another's as this one's.
    Here a transfer is given up when the process that it was sent to has ended, and only then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._server: Server | None = None
        self._collects = False
        super().__init__(*args, **kwargs)
        self._health_event = HealthEvent()

    @property
    def is_healthy(self) -> bool:
        """Whether the server takes transfers; while they are collected, whether it may end them."""
        if (self.store_futures or self.retrieve_futures) and self._server:
            return not self._server.ended and (self._collects or bool(super().is_healthy))
        return bool(super().is_healthy)

    def submit_store_request(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        """Store a step of a prompt, after which those of earlier steps do not end it."""
        # Else a prompt of several steps counts as stored when its first step is, and its last
        # blocks are reused while the server reads them.
        self.finished_stores.discard(request_id)
        self._note_server()
        return super().submit_store_request(request_id, *args, **kwargs)

    def submit_retrieve_request(self, *args: Any, **kwargs: Any) -> Any:
        """Load a prompt's KV."""
        self._note_server()
        return super().submit_retrieve_request(*args, **kwargs)

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> Any:
        """Return the transfers that have ended."""
        self._collects = True
        try:
            return super().get_finished(finished_req_ids_from_engine)
        finally:
            self._collects = False

    def handle_preemptions(self, need_flush_before_forward: bool) -> None:
        """Wait until stores have ended, or their server has: their blocks may be reused now.

        LMCache waits only while pings are answered, and not longer than for any message.
        """
        server = self._server
        while need_flush_before_forward and server and not server.ended:
            if not (stores := self.stores_under_way()):
                break
            next(iter(stores)).wait(_POLL_S)
        super().handle_preemptions(need_flush_before_forward)

    def stores_under_way(self) -> set[Any]:
        """Return a token for each store that the server has not ended; any thread may ask."""
        return {one for one in list(self.store_futures.values()) if not one.query()}

    def _note_server(self) -> None:
        """Note the process that transfers are sent to, if none is under way."""
        if not (self.store_futures or self.retrieve_futures):
            self._server = self._health_event.server

    def _send_register_kv_caches_request(self, kv_caches: dict[str, Any]) -> None:
        # Held before it answers: one that takes its place meanwhile does not know this engine.
        server = listening_server()
        super()._send_register_kv_caches_request(kv_caches)
        self._health_event.server = server


class GuardedSchedulerAdapter(upstream.LMCacheMPSchedulerAdapter):  # type: ignore[misc]
    """LMCache's scheduler side, which does not wait for a lookup that ended with its server.

    LMCache gives lookups up when a ping fails. Where the server is replaced between two pings, a
    request would wait for five minutes.

    It also leaves nothing on the server when a request ends early: no locks of a lookup that no
    load follows, and no session that a load opens again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._server: Server | None = None
        self._asked: dict[str, Server | None] = {}
        self._loading: set[str] = set()
        self._ended_loading: set[str] = set()
        super().__init__(*args, **kwargs)

    def maybe_submit_lookup_request(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Ask what of a prompt can be loaded, unless that was asked."""
        if request_id not in self._asked:
            if self._server is None or self._server.ended:
                self._server = listening_server()
            self._asked[request_id] = self._server
        super().maybe_submit_lookup_request(request_id, *args, **kwargs)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Return the tokens that can be loaded; None while the answer is awaited."""
        found: int | None = super().check_lookup_result(request_id)
        server = self._asked.get(request_id)
        return 0 if found is None and server and server.ended else found

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a lookup."""
        self._asked.pop(request_id, None)
        super().cleanup_lookup_result(request_id)

    def is_loading(self, request_id: str) -> bool:
        """Tell whether vLLM waits for a request's load."""
        return request_id in self._loading

    def begin_load(self, request_id: str) -> None:
        """Note that vLLM waits for a request's load."""
        self._loading.add(request_id)

    def end_load(self, request_id: str) -> None:
        """Note that all ranks have loaded, or failed to; end the session if the request ended."""
        self._loading.discard(request_id)
        if request_id in self._ended_loading:
            self._ended_loading.remove(request_id)
            self.end_session(request_id)

    def release_lookup(self, request_id: str) -> None:
        """Unlock what a request found on the server, if it has not begun to load it.

        LMCache leaves it locked for five minutes, during which the server cannot evict it.
        """
        if request_id in self._pending_lookups and request_id in self._lookup_params:
            tokens, salt, configs = self._lookup_params[request_id]
            chunk = self.lmcache_tokens_per_chunk
            end = len(tokens) // chunk * chunk
            self.free_lookup_locks(tokens, 0, end, request_id, salt, configs)

    def end_session(self, request_id: str) -> None:
        """Have the server forget a request; after its load, which would open the session again."""
        if request_id in self._loading:
            self._ended_loading.add(request_id)
        else:
            super().end_session(request_id)


@timed_steps
class PatchedLMCacheMPConnector(upstream.LMCacheMPConnector):  # type: ignore[misc]
    """LMCacheMPConnector with the kit's barrier, guard and names."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        """Connect to the server; raise ConnectionError where it does not answer."""
        upstream.LMCacheMPWorkerAdapter = GuardedAdapter
        upstream.LMCacheMPSchedulerAdapter = GuardedSchedulerAdapter
        if prefix := os.environ.get(SHARED_MEMORY_ENV):
            # Each rank has its own: when it starts, the others may be using theirs.
            prefix = f"{prefix}-{vllm_config.parallel_config.rank}"
            CpuShmTensorWrapper.SHM_NAME_PREFIX = f"/{prefix}-"
            if role == KVConnectorRole.WORKER:
                remove_left(prefix)
        self._awaited_stores: set[str] = set()
        given, self._identity = identified(vllm_config)
        super().__init__(given, role, kv_cache_config)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens of a prompt that can be loaded; none where tokens are not its key.

        The server's keys know no LoRA adapter and no embeddings. They know salts; but that a
        salted request keeps to itself is what `deploy check` measures noise by. A prompt that vLLM
        needs computed is not loaded either (fix B25 of the other connector).
        """
        if foreign(request) is not None:
            self._get_or_create_request_tracker(request).max_offload_tokens = 0  # nor stored
            return 0, False
        if is_computed_whole(request):
            self._get_or_create_request_tracker(request)
            return 0, False
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a request's blocks, and whether a load of it failed.

        vLLM computes again from the first block that was not loaded. LMCache would still count all
        tokens of the load as computed, so that of a prompt of several steps it would store chunks
        before the step that computes their last tokens.
        """
        tracker = self._get_request_tracker(request.request_id)
        was_loading = tracker.state == upstream.LMCacheMPRequestState.READY
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self.scheduler_adapter.begin_load(request.request_id)
        # The last token of a prompt that was loaded whole is computed again.
        if was_loading and request.num_computed_tokens < tracker.num_lmcache_hit_tokens - 1:
            tracker.num_vllm_hit_tokens = request.num_computed_tokens
            tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = 0

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether a request's blocks are kept until its stores are reported.

        vLLM keeps the blocks of a request that ends while it loads until a load or a store of it is
        reported, whichever comes first. LMCache's workers report such a request as stored at once,
        so its blocks are reused while the server writes to them; and at the second report vLLM's
        assertion ends the engine. So only the load counts here. No store of a request that loads is
        under way: a preemption waits for them.
        """
        adapter = self.scheduler_adapter
        loading = adapter.is_loading(request.request_id)
        adapter.release_lookup(request.request_id)
        stores, params = super().request_finished(request, block_ids)
        if stores and not loading:
            self._awaited_stores.add(request.request_id)
        return stores and not loading, params

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which loads have ended; drop reports of stores that vLLM does not wait for."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self.scheduler_adapter.end_load(request_id)
        stored = self._awaited_stores.intersection(connector_output.finished_sending or ())
        self._awaited_stores -= stored
        connector_output.finished_sending = stored or None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Give vLLM's KV tensors to the server, then answer the API server's questions."""
        require_own_number()
        super().register_kv_caches(kv_caches)
        adapter = self.worker_adapter
        # LMCache pings from the first transfer on. An engine that idles before it is forgotten by
        # the server, and as the first ping is answered, it never registers again.
        adapter._ensure_heartbeat_started()
        given = self._vllm_config.kv_transfer_config.get_from_extra_config
        REPORT.set_kv(
            {
                "client": "lmcache-mp",
                "lmcache": installed_lmcache(),
                "vllm": installed_vllm(),
                "namespace": given("pdkit.namespace", None),
                "layout": object_layout(),
                **self._identity,
                "world_size": adapter.world_size,
                "chunk_size": adapter.lmcache_tokens_per_chunk,
                "instance": adapter.instance_id,
            }
        )
        wait = partial(
            stored_by_server,
            os.environ.get(SOCKET_ENV, ""),
            given("pdkit.stored_in", MEMORY),
            adapter._health_event.is_set,
        )
        open_socket(
            self._vllm_config.parallel_config.rank, answer(adapter.stores_under_way, then=wait)
        )


def remove_left(prefix: str) -> None:
    """Remove shared memory that a worker of this name left when it was killed."""
    left = sorted(_SHARED_MEMORY.glob(f"{prefix}-*"))
    for file in left:
        with suppress(OSError):  # such as another user's
            file.unlink()
    if left:
        get_logger().info("pdkit-connector removed shared memory of an earlier run: %d", len(left))
