"""B7: a load with a hole says that KV was loaded which was not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine import partial_loads
from pdkit_connector.in_engine.layer_steps import idle_engine, replace_method, silent
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_CHUNK = 4


def probe(_setting: Setting) -> ProbeResult:
    """Load three chunks of which the second is gone, as a whole and by layer."""
    wrong = []
    if not _layerwise_is_true():
        wrong.append("a layerwise load counts it as retrieved")
    if not _plain_is_true():
        wrong.append("a plain load counts chunks that it did not load")
    if wrong:
        return ProbeResult(Need.NEEDED, f"with the second of three chunks gone, {', '.join(wrong)}")
    return ProbeResult(Need.NOT_NEEDED, "a load ends where the first chunk is missing")


def apply(_setting: Setting) -> str:
    """End every load at its first missing chunk, and give the rest back to the staging pool."""
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    ended = []
    if not _layerwise_is_true():
        replace_method(LMCacheEngine, "retrieve_layer", partial_loads.layerwise)
        ended.append("layerwise loads")
    if not _plain_is_true():
        replace_method(LMCacheEngine, "_process_tokens_internal", partial_loads.plain)
        replace_method(StorageManager, "batched_get", partial_loads.collected)
        ended.append("plain loads")
    return f"ended at the first missing chunk: {', '.join(ended)}"


def _plain_is_true() -> bool:
    """Load three chunks, the second of which is gone; see whether the mask tells what came."""
    import torch

    engine = _engine_of_three()
    mask = torch.zeros(3 * _CHUNK, dtype=torch.bool)
    gone = [_memory_obj(), None, _memory_obj()]
    engine.storage_manager = SimpleNamespace(
        contains=lambda *_args, **_kwargs: "store",
        get_block_mapping=lambda chunks: {"store": chunks},
        non_allocator_backends=[],
        batched_get=partial(partial_loads.collected, lambda _manager, **_asked: gone, None),
    )
    with silent("lmcache.v1.cache_engine"):
        chunks, _ = engine._process_tokens_internal([1] * 3 * _CHUNK, None, mask)
    loaded = torch.zeros_like(mask)
    for _, _, start, end in chunks:
        loaded[start:end] = True
    return bool((mask == loaded).all()) and not mask[_CHUNK:].any()


def _layerwise_is_true() -> bool:
    """Load three chunks by layer, the second of which is gone; look at the mask."""
    engine = _engine_of_three()
    short = SimpleNamespace(result=lambda: [_memory_obj()])
    engine.storage_manager = SimpleNamespace(
        contains=lambda *_args, **_kwargs: "store",
        layerwise_batched_get=lambda keys, **_kwargs: iter([short] * len(keys)),
    )
    engine.gpu_connector = object.__new__(_layerwise_mover())
    engine.gpu_connector.batched_to_gpu = partial(_take, engine.num_layers)
    with silent("lmcache.v1.cache_engine"):
        *_, mask = engine.retrieve_layer([1] * 3 * _CHUNK, req_id="probe")
    return bool(mask[:_CHUNK].all()) and not mask[_CHUNK:].any()


def _engine_of_three() -> Any:
    engine = idle_engine()
    infos = [(at * _CHUNK, (at + 1) * _CHUNK, _own_key()) for at in range(3)]
    engine.token_database = SimpleNamespace(process_tokens=lambda **_kwargs: iter(infos))
    engine.lookup_cache, engine.lookup_pins = {}, {}
    engine.remove_after_retrieve = False
    return engine


def _own_key() -> Any:
    """Return a cache key that is equal to itself alone, and split into itself by layer."""
    from lmcache.utils import CacheEngineKey

    class OwnKey(CacheEngineKey):  # type: ignore[misc]
        __eq__ = object.__eq__
        __hash__ = object.__hash__

        def __init__(self) -> None:
            pass

        def split_layers(self, num_layers: int) -> list[OwnKey]:
            return [self] * num_layers

    return OwnKey()


def _memory_obj() -> Any:
    return SimpleNamespace(get_size=lambda: 1, ref_count_down=lambda: None, is_pinned=False)


def _take(num_layers: int, _starts: Any, _ends: Any, **_kwargs: Any) -> Any:
    for _ in range(num_layers + 2):
        yield


def _layerwise_mover() -> type:
    """Return the class by which LMCache tells a layerwise mover."""
    from lmcache.v1 import gpu_connector

    module: Any = getattr(gpu_connector, "gpu_connectors", gpu_connector)
    mover: type = module.VLLMPagedMemLayerwiseGPUConnector
    return mover


FIX = Fix(
    id="B7",
    title="a load with a hole counts KV that was not loaded",
    link="none",
    reason=(
        "When a chunk is evicted between lookup and load, a layerwise load, and up to 0.4.3 the "
        "plain one, reports tokens as retrieved that were never written, and vLLM computes with "
        "what was in their blocks before. The fix ends each load at its first missing chunk."
    ),
    probe=probe,
    apply=apply,
)
