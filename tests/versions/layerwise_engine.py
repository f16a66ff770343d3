"""A layerwise LMCache that is real but for its device: what the cells of the B2 family drive.

Real: LMCacheEngine, its token database, StorageManager with the local CPU backend, and the vLLM
adapter's worker methods. Stood in for: vLLM's KV (one row of a tensor a slot and layer), the mover
between it and LMCache, and the adapter's constructor, which would start servers.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lmcache_objects import metadata

LAYERS = 3
CHUNK = 8
BLOCK = 4
WIDTH = 4
SLOTS = 256


class Tensor(torch.Tensor):
    """A CPU tensor that stays where it is: LMCache 0.3.9 moves slot mappings by `.cuda()`."""

    def cuda(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self


def make_engine(*, remote: bool = False, **config: Any) -> Any:
    """Return a started LMCacheEngine; `remote` adds the Redis of the trial."""
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    values = {"chunk_size": CHUNK, "use_layerwise": True, "max_local_cpu_size": 0.01, **config}
    if remote:
        values["remote_url"] = f"redis://127.0.0.1:{os.environ['REDIS_PORT']}"
    settings = LMCacheEngineConfig.from_defaults(**values)
    facts = metadata(kv_dtype=torch.float32, kv_shape=(LAYERS, 2, CHUNK, 1, WIDTH))
    database = ChunkedTokenDatabase(settings, facts)
    # The constructor collects garbage: all of torch and vLLM would be walked for each engine.
    with mock.patch("gc.collect"):
        engine = LMCacheEngine(settings, facts, database, _mover(), _broadcast, _broadcast)
        engine.post_init(kvcaches=[])
    return engine


def _broadcast(thing: Any, _source: int) -> Any:
    return thing


def _mover() -> Any:
    """Return a mover of the class that LMCache insists on, for plain tensors."""
    kind = "VLLMPagedMemLayerwiseGPUConnector"
    home = importlib.import_module("lmcache.v1.gpu_connector")
    if not hasattr(home, kind):
        home = importlib.import_module("lmcache.v1.gpu_connector.gpu_connectors")

    class Mover(getattr(home, kind)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.kv = torch.zeros(LAYERS, SLOTS, 2 * WIDTH)
            # The layer and first slot of the copy that fails.
            self.fails_at: tuple[int, int] | None = None

        def initialize_kvcaches_ptr(self, **_kwargs: Any) -> None:
            pass

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([num_tokens, 2, WIDTH])

        def batched_from_gpu(self, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> Any:
            slots = kwargs["slot_mapping"].as_subclass(torch.Tensor)
            for layer in range(LAYERS):
                if self.fails_at == (layer, int(slots[0])):
                    raise RuntimeError(f"no copy of layer {layer}")
                for memory, start, end in zip(objects[layer], starts, ends, strict=True):
                    rows = self.kv[layer][slots[start:end]]
                    memory.tensor.copy_(rows.view(memory.tensor.shape))
                yield
            yield

        def batched_to_gpu(self, starts: Any, ends: Any, **kwargs: Any) -> Any:
            slots = kwargs["slot_mapping"].as_subclass(torch.Tensor)
            for layer in range(LAYERS):
                objects = yield
                # Not strict, as LMCache's own movers are not.
                for memory, start, end in zip(objects, starts, ends, strict=False):
                    rows = memory.tensor.reshape(end - start, 2 * WIDTH)
                    self.kv[layer][slots[start:end]] = rows
            yield
            yield

    return Mover()


def filled(engine: Any, first_slot: int, tokens: int) -> torch.Tensor:
    """Write KV other than zero into slots, as the model would; return it by layer and slot."""
    kv = engine.gpu_connector.kv
    kv[:, first_slot : first_slot + tokens] = torch.rand(LAYERS, tokens, 2 * WIDTH) + 1
    return kv[:, first_slot : first_slot + tokens].clone()


def make_adapter(engine: Any, *, role: str = "kv_both") -> Any:
    """Return the worker's adapter, as its constructor of this release leaves it, less servers."""
    from pdkit_connector.in_engine.adapter_miniature import idle_adapter

    adapter: Any = idle_adapter(engine, role=role)
    adapter._block_size, adapter._lmcache_chunk_size = BLOCK, CHUNK
    return adapter


def request(
    req_id: str,
    tokens: int,
    *,
    first_slot: int = 0,
    saved: int | None = 0,
    load: tuple[int, int] | None = None,
    seed: int = 0,
    configs: dict[str, Any] | None = None,
) -> Any:
    """Return a ReqMeta of `tokens` tokens in slots from `first_slot`.

    `saved` tokens are saved before, None where nothing may be saved; `load` is the tokens that vLLM
    and LMCache have; `configs` is what its sender wants of LMCache, such as tags.
    """
    from lmcache.integration.vllm import vllm_v1_adapter as module

    load_spec = save_spec = None
    if load is not None:
        load_spec = module.LoadSpec(
            vllm_cached_tokens=load[0], lmcache_cached_tokens=load[1], can_load=True
        )
    if saved is not None:
        save_spec = module.SaveSpec(skip_leading_tokens=saved, can_save=True)
    slots = torch.arange(first_slot, first_slot + tokens).as_subclass(Tensor)
    facts = {
        "req_id": req_id,
        "token_ids": [seed * 1000 + i for i in range(tokens)],
        "slot_mapping": slots,
        "is_last_prefill": True,
        "save_spec": save_spec,
        "load_spec": load_spec,
        "disagg_spec": None,
        "request_configs": configs,
    }
    return module.ReqMeta(**{k: v for k, v in facts.items() if k in module.ReqMeta.__annotations__})


class Worker:
    """Steps of vLLM's worker: bind, load, each layer, save, finish."""

    def __init__(self, engine: Any, *, role: str = "kv_both") -> None:
        self.engine = engine
        self.adapter = make_adapter(engine, role=role)
        self.metadata = None

    def begin(self, *requests: Any, attention: bool = True) -> None:
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata

        metadata = LMCacheConnectorMetadata(requests=list(requests))
        parent = SimpleNamespace(
            _connector_metadata=metadata, _get_connector_metadata=lambda: metadata
        )
        self.adapter._parent = parent
        self.adapter.start_load_kv(SimpleNamespace(attn_metadata=object() if attention else None))

    def layer(self, index: int) -> None:
        self.adapter.wait_for_layer_load(f"layer{index}")
        self.adapter.save_kv_layer(f"layer{index}", torch.empty(0), object())

    def end(self, finished: set[str] = frozenset()) -> set[int]:  # type: ignore[assignment]
        self.adapter.wait_for_save()
        self.adapter.get_finished(finished)
        return set(self.adapter.get_block_ids_with_load_errors())

    def step(self, *requests: Any, finished: set[str] = frozenset()) -> set[int]:  # type: ignore[assignment]
        """Run one step; return the blocks that failed to load."""
        self.begin(*requests)
        for index in range(LAYERS):
            self.layer(index)
        return self.end(finished)
