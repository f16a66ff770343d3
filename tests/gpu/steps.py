"""A consumer's first step for a prompt, by vLLM's own scheduler and model runner, up to the model.

Real: the scheduler, LMCache's adapter with the kit's fixes, the dispatch of steps to CUDA graphs,
and `execute_model` of both model runners, which decides where loads happen. Stood in for: what
makes tensors for the model, the model itself, and LMCache's engine, which notes what it loads.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

CHUNK = 256
BLOCK = 16
BLOCKS = 1024


class _Model(Exception):
    """Raised where the model would run, with the kind of the step."""


@dataclass
class Engine:
    """LMCache's engine: has all that it is asked for, and notes how many tokens it loaded."""

    loaded: list[int] = field(default_factory=list)
    lookup_pins: dict[str, Any] = field(default_factory=dict)
    storage_manager: Any = None

    def retrieve(self, _tokens: Any, mask: Any, **_more: Any) -> Any:
        self.loaded.append(int(mask.sum()))
        return mask.clone()

    def lookup_unpin(self, _req_id: str) -> None:
        pass

    def get_kv_events(self) -> None:
        pass


class Consumer:
    """An engine that has to load a prompt of which the store has all whole chunks."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.kv = _kv_cache_config(config)
        config.cache_config.num_gpu_blocks = BLOCKS
        self.engine = Engine()
        self.scheduler: Any = None

    def first_step(self, tokens: int, **wanted: Any) -> dict[str, Any]:
        """Return what the first step of a prompt computes, its kind, and what it loaded."""
        output = self.scheduled(tokens, **wanted)
        runner = _second if self.config.use_v2_model_runner else _first
        worker = self._connector("WORKER", engine=self.engine)
        with _kv_transfer_group(worker), runner(self, output, worker) as execute:
            kind = "none"
            try:
                execute(output)
            except _Model as ran:
                kind = str(ran)
        return {
            "computes": output.total_num_scheduled_tokens,
            "kind": kind,
            "loaded": sum(self.engine.loaded),
        }

    def step_after_failed_load(self, tokens: int) -> int:
        """Return how many tokens the step computes that follows on a load of which all failed."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduled(tokens)
        (prompt,) = output.scheduled_new_reqs
        failed = KVConnectorOutput(invalid_block_ids=set(prompt.block_ids[0]))
        told = ModelRunnerOutput(
            req_ids=[prompt.req_id],
            req_id_to_index={prompt.req_id: 0},
            sampled_token_ids=[[7]],
            kv_connector_output=failed,
        )
        self.scheduler.update_from_output(output, told)
        return int(self.scheduler.schedule().total_num_scheduled_tokens)

    def scheduled(self, tokens: int, **wanted: Any) -> Any:
        """Return the scheduler's output for a prompt of so many tokens."""
        self.scheduler = self._scheduler(tokens // CHUNK * CHUNK)
        self.scheduler.add_request(self.prompt(tokens, **wanted))
        return self.scheduler.schedule()

    def prompt(self, tokens: int, **wanted: Any) -> Any:
        """Return a request of so many tokens; `wanted` are further sampling parameters."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        return Request(
            "prompt", list(range(tokens)), SamplingParams(max_tokens=16, **wanted), None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )  # fmt: skip

    def _scheduler(self, found: int) -> Any:
        from pdkit_connector.in_engine.adapter_miniature import LookupClient
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        connector = self._connector("SCHEDULER", client=LookupClient(found))
        with mock.patch.object(KVConnectorFactory, "create_connector", return_value=connector):
            return self.config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.config,
                kv_cache_config=self.kv,
                structured_output_manager=mock.MagicMock(),
                block_size=BLOCK,
            )

    def _connector(self, role: str, **services: Any) -> Any:
        """Return the kit's connector around LMCache's adapter, without LMCache's services."""
        from pdkit_connector.connector import PatchedLMCacheConnector
        from pdkit_connector.in_engine.adapter_miniature import miniature
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorBase_V1,
            KVConnectorRole,
        )

        connector = object.__new__(PatchedLMCacheConnector)
        KVConnectorBase_V1.__init__(connector, self.config, KVConnectorRole[role], self.kv)
        connector._kv_cache_events, connector._lookups = None, {}
        connector._lmcache_engine = miniature(
            **services, _parent=connector, _block_size=BLOCK, _lmcache_chunk_size=CHUNK,
            kv_role=self.config.kv_transfer_config.kv_role,
        )  # fmt: skip
        return connector


def _kv_cache_config(config: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    model = config.model_config
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


@contextlib.contextmanager
def _kv_transfer_group(worker: Any) -> Iterator[None]:
    from vllm.distributed.kv_transfer import kv_transfer_state

    with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker):
        yield


class _Nothing:
    """What a runner has and this step does not need: false, empty, and callable."""

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self

    __enter__ = __exit__ = __getitem__ = __call__


class _States(SimpleNamespace):
    """The state of requests, as far as the dispatch of steps looks at it."""

    def __getattr__(self, _name: str) -> Any:
        return _Nothing()


def _bare(kind: type, hidden: tuple[str, ...], **own: Any) -> Any:
    """Return a runner that was not constructed: `hidden` methods do nothing."""

    def missing(_self: Any, _name: str) -> Any:
        return _Nothing()

    methods = {name: _blank(getattr(kind, name)) for name in hidden if hasattr(kind, name)}
    runner = object.__new__(type("Runner", (kind,), {"__getattr__": missing, **methods}))
    runner.__dict__.update(own)
    return runner


def _blank(method: Any) -> Any:
    """Return a method that gives nothing, as often as the real one gives something."""
    gives = inspect.signature(method).return_annotation
    parts = typing.get_args(gives) if typing.get_origin(gives) is tuple else ()
    answer = tuple(_Nothing() for _ in parts) if parts else _Nothing()
    return lambda *_args, **_kwargs: answer


def _ran(kind: Any = None) -> Any:
    """Return what stands for the model: it raises the step's kind."""

    def run(*_args: Any, **_kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context

        raise _Model((kind or get_forward_context().cudagraph_runtime_mode).name)

    return run


_TENSORS_OF_FIRST = (
    "_update_states", "_prepare_inputs", "_get_slot_mappings", "_build_attention_metadata",
    "_preprocess", "_prepare_padding_mask", "synchronize_input_prep",
)  # fmt: skip
_TENSORS_OF_SECOND = (
    "update_pp_decode_requests", "finish_requests", "free_states", "add_requests",
    "update_requests", "prepare_inputs", "prepare_attn",
)  # fmt: skip
# Features that are off.
_NOT_IN_SECOND = (
    "pcp_manager", "aux_output_connector", "encoder_cache", "adaptive_verification",
    "ubatch_runner",
)  # fmt: skip


@contextlib.contextmanager
def _first(consumer: Consumer, output: Any, _worker: Any) -> Iterator[Any]:
    """Give `execute_model` of vLLM's first model runner."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config = consumer.config
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1)
    ids = list(output.num_scheduled_tokens)
    runner = _bare(
        GPUModelRunner,
        _TENSORS_OF_FIRST,
        **_parts(config),
        execute_model_state=None,
        cudagraph_dispatcher=dispatcher,
        uniform_decode_query_len=1,
        attn_groups=[[]],
        kv_cache_config=consumer.kv,
        input_batch=SimpleNamespace(num_reqs=len(ids), req_ids=ids, lora_id_to_lora_request={}),
        _model_forward=_ran(),
    )
    yield runner.execute_model


@contextlib.contextmanager
def _second(consumer: Consumer, output: Any, worker: Any) -> Iterator[Any]:
    """Give `execute_model` of vLLM's second model runner."""
    import numpy as np
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    config = consumer.config
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with mock.patch.object(cudagraph_utils, "get_pp_group", lambda: alone):
        graphs = cudagraph_utils.CudaGraphManager(
            config, "cpu", config.compilation_config.cudagraph_mode, 1
        )
    graphs._graphs_captured = True
    graphs.run_fullgraph = _ran(CUDAGraphMode.FULL)
    graphs.run_pw_graph = _ran(CUDAGraphMode.PIECEWISE)
    prompt = output.scheduled_new_reqs[0]
    runner = _bare(
        GPUModelRunner,
        _TENSORS_OF_SECOND,
        **_parts(config),
        cudagraph_manager=graphs,
        kv_connector=_active(ActiveKVConnector, config, worker),
        decode_query_len=1,
        dp_size=1,
        dp_rank=0,
        dcp_size=1,
        is_first_pp_rank=True,
        kv_cache_config=consumer.kv,
        model=_ran(CUDAGraphMode.NONE),
        **dict.fromkeys(_NOT_IN_SECOND),
        req_states=_States(
            req_id_to_index={prompt.req_id: 0},
            prefill_len=SimpleNamespace(np=np.array([len(prompt.prompt_token_ids)])),
            num_computed_prefill_tokens=np.array([prompt.num_computed_tokens]),
        ),
    )
    yield runner.execute_model


def _active(kind: type, config: Any, worker: Any) -> Any:
    """Return the second runner's wrapper of a connector, which has its KV tensors already."""
    wrapper = object.__new__(kind)
    wrapper.__dict__.update(
        vllm_config=config, kv_connector=worker, _disabled=False, _pending_load_kwargs=None
    )
    return wrapper


def _parts(config: Any) -> dict[str, Any]:
    names = ("model", "cache", "parallel", "compilation", "scheduler", "speculative", "lora")
    return {
        "vllm_config": config,
        "observability_config": config.observability_config,
        **{f"{name}_config": getattr(config, f"{name}_config") for name in names},
    }
