"""An engine with the connector to LMCache's server, step by step, without a model and a server.

Real: vLLM's scheduler, its part of a worker that calls the connector, what puts the reports of all
ranks together, and both sides of the connector. Stood in for: the model, which says 7, and the
server, which ends lookups and transfers when the test has it do so.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from lmcache.integration.vllm import lmcache_mp_connector as upstream
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.futures import MessagingFuture
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as worker_steps

BLOCK, CHUNK, STEP = 32, 256, 512
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
}


def engine_config(folder: Path, connector: str, module: str, role: str, ranks: int) -> Any:
    """Return vLLM's configuration of an engine of a tiny model."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    given = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.server_urls": ["ipc://nowhere"]},
    }
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=STEP,
        block_size=BLOCK,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        async_scheduling=False,
        kv_transfer_config=given,
    ).create_engine_config()


class Server:
    """LMCache's server, as its clients see it: what it is sent, and what it has locked."""

    def __init__(self, ranks: int) -> None:
        self.has_chunks = 0
        self.sent: list[tuple[str, str]] = []
        # Objects, of which there is one a chunk and rank.
        self.locked: Counter[str] = Counter()
        self._ranks = ranks
        self._held: list[MessagingFuture[None]] | None = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> Server:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def send(*args: Any) -> MessagingFuture[Any]:
            future: MessagingFuture[Any] = MessagingFuture()
            asked = args[0] if args else ""
            request = getattr(asked, "request_id", asked)
            self.sent.append((name, str(request)))
            answer = getattr(self, f"_{name}", lambda *_: None)(request, asked)
            if name == "lookup" and self._held is not None:
                self._held.append(future)
            else:
                future.set_result(answer)
            return future

        return send

    def hold_lookups(self) -> None:
        """Answer no lookup until `answer_lookups`."""
        self._held = []

    def answer_lookups(self) -> None:
        held, self._held = self._held or [], None
        for future in held:
            future.set_result(None)

    def asked_for(self, request: str) -> list[str]:
        """Return what it was asked for a request, and where its transfers ended."""
        return [name for name, asked in self.sent if asked == request]

    @staticmethod
    def _get_chunk_size(*_: Any) -> int:
        return CHUNK

    @staticmethod
    def _get_experimental(*_: Any) -> list[str]:
        return []

    def _lookup(self, request: str, key: Any) -> None:
        self.locked[request] += min(self.has_chunks, key.end // CHUNK) * self._ranks

    def _query_prefetch_status(self, request: str, _: Any) -> int:
        return self.locked[request] // self._ranks

    def _free_lookup_locks(self, request: str, key: Any) -> None:
        freed = (key.end // CHUNK - key.start // CHUNK) * self._ranks
        self.locked[request] -= min(self.locked[request], freed)

    def loaded(self, key: Any) -> None:
        self.locked[key.request_id] -= key.end // CHUNK - key.start // CHUNK


class Transfers:
    """A rank's transfers, each of which lasts until the test ends it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.under_way: list[tuple[str, str, set[int], Any, Any]] = []

    def flush_inflight_stores(self) -> None:
        pass

    def create_recorded_event(self) -> None:
        pass

    def submit_store(self, request: str, key: Any, _kv: Any, blocks: Any, *_: Any) -> Any:
        return self._begin("store", request, key, blocks)

    def submit_retrieve(
        self, request: str, key: Any, _kv: Any, blocks: Any, *_: Any, **__: Any
    ) -> Any:
        return self._begin("load", request, key, blocks)

    def _begin(self, kind: str, request: str, key: Any, blocks: Any) -> Any:
        future: MessagingFuture[bool] = MessagingFuture()
        own = {one for group in blocks for one in group}
        self.under_way.append((kind, request, own, key, future))
        return future

    def end(self, kinds: tuple[str, ...], works: bool) -> None:
        for one in [one for one in self.under_way if one[0] in kinds]:
            kind, _, _, key, future = one
            self.under_way.remove(one)
            if kind == "load":
                self._server.loaded(key)
            self._server.sent.append((kind, key.request_id))
            future.set_result(works)


class Engine:
    """An engine whose steps the test makes; `ranks` workers."""

    def __init__(self, config: Any, monkeypatch: Any, blocks: int = 64) -> None:
        init_none_hash(sha256)
        self.server, self.config = Server(config.parallel_config.world_size), config
        for name in ("LMCacheMPWorkerAdapter", "LMCacheMPSchedulerAdapter"):  # the kit's follow
            monkeypatch.setattr(upstream, name, getattr(adapters, name))
        monkeypatch.setattr(adapters.RequestClientFactory, "create", self.server)
        monkeypatch.setattr(adapters.HeartbeatThread, "start", lambda _: None)
        model, ranks = config.model_config, config.parallel_config.world_size
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=model.get_num_kv_heads(config.parallel_config),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(config, kv, mock.MagicMock(), BLOCK)
        self.workers, self.ranks = [], [Transfers(self.server) for _ in range(ranks)]
        for rank, transfers in enumerate(self.ranks):
            of_rank = copy.copy(config)
            of_rank.parallel_config = copy.copy(config.parallel_config)
            of_rank.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(of_rank, KVConnectorRole.WORKER, kv)
            worker.worker_adapter.transfer_ctx = transfers
            worker.worker_adapter._block_ids_per_group = lambda op: op.block_ids
            self.workers.append(worker)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, ranks)
        self.freed: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self._free = self.scheduler._free_blocks
        self.scheduler._free_blocks = self._count_free

    @property
    def stores(self) -> bool:
        return bool(self.config.kv_transfer_config.is_kv_producer)

    def nothing_noted(self) -> bool:
        """Tell whether the connector keeps nothing of requests that have ended."""
        connector = self.scheduler.connector
        adapter = connector.scheduler_adapter
        kept = [connector._awaited_stores, adapter._loading, adapter._ended_loading]
        kept += [adapter._pending_lookups, adapter._asked, connector.request_trackers]
        return not any(kept)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def state(self, name: str) -> str:
        return str(self.scheduler.requests[name].status.name)

    def add(self, name: str, tokens: int, answer: int = 4, first: int | None = None) -> None:
        """Have a client ask; prompts of different `first` tokens share nothing."""
        start = len(self.answers) if first is None else first
        self.answers[name] = 0
        request = Request(
            name, [start, *range(1, tokens)], SamplingParams(max_tokens=answer, ignore_eos=True),
            None, block_hasher=get_request_block_hasher(BLOCK, sha256),
        )  # fmt: skip
        self.scheduler.add_request(request)

    def leave(self, name: str) -> None:
        """Do what vLLM does when a client has left."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, scheduled: Any = None, computed: Any = None) -> None:
        """Make a step; act when it has been scheduled, and when the workers have done it."""
        output = self.scheduler.schedule()
        if scheduled:
            scheduled()
        told = self._work(output)
        if computed:
            computed()
        self.scheduler.update_from_output(output, told)
        self._check_blocks()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def end(self, *kinds: str, works: bool = True, rank: int | None = None) -> None:
        """Have the server end all loads, stores or both."""
        for transfers in self.ranks if rank is None else [self.ranks[rank]]:
            transfers.end(kinds or ("load", "store"), works)

    def finish(self) -> None:
        """Make steps until nothing is left to do, while the server ends what it is given."""
        self.server.answer_lookups()
        for _ in range(100):
            if not self.scheduler.has_requests():
                return
            self.end()
            self.step()
        raise AssertionError(f"requests that never end: {list(self.scheduler.requests)}")

    def loading_of(self, name: str) -> int:
        return sum(
            kind == "load" and request == name
            for transfers in self.ranks
            for kind, request, *_ in transfers.under_way
        )

    def _work(self, output: Any) -> ModelRunnerOutput:
        reports = []
        for worker in self.workers:
            worker.handle_preemptions(output.kv_connector_metadata)
            with mock.patch.object(worker_steps, "get_kv_transfer_group", lambda w=worker: w):
                reports.append(
                    worker_steps.KVConnectorModelRunnerMixin.kv_connector_no_forward(
                        output, self.config
                    )
                )
        told = reports[0] if len(reports) == 1 else self.aggregator.aggregate(reports)
        names = list(output.num_scheduled_tokens)
        said = []
        for name in names:
            request = self.scheduler.requests.get(name)
            whole = request is not None and request.num_computed_tokens >= request.num_tokens
            said.append([7] if whole else [])
            self.answers[name] += whole
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=said,
            kv_connector_output=told.kv_connector_output,
        )

    def _count_free(self, request: Any) -> None:
        self.freed[request.request_id] += 1
        self._free(request)

    def _check_blocks(self) -> None:
        """Assert that what the server reads and writes is the request's that asked for it."""
        for transfers in self.ranks:
            for kind, name, blocks, *_ in transfers.under_way:
                assert name in self.scheduler.requests, f"{name}'s blocks were freed in its {kind}"
                (own,) = self.scheduler.kv_cache_manager.get_block_ids(name)
                assert blocks <= set(own), f"{name}'s blocks were given away in its {kind}"
