"""B17: LMCache's in-process mode has no mover for the CPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

from pdkit_connector.errors import UnsupportedSetting
from pdkit_connector.in_engine.cpu_blocks import Geometry
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.partial_loads import as_miss
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

LAYOUT_TAG = "lmcache.tag.kv_layout"

# Names how the movers lay blocks out inside a memory object; change it whenever that changes.
_OBJECT_LAYOUT = "pd1"

_PROBE_MODEL = "pdkit-probe"

# The mover made for this process, for the check of vLLM's tensors that follows.
_made: list[Any] = []


def probe(setting: Setting) -> ProbeResult:
    """Ask LMCache for a CPU mover and see whether it has one."""
    known = _lmcache_device()
    if known is None and setting.device_type in (None, "cpu"):
        # Releases that detect no device stop on a CPU before they ask for a mover.
        need = Need.NEEDED if setting.engine else Need.NOT_APPLICABLE
        return ProbeResult(need, "this LMCache detects no device and starts on cards only")
    device = setting.device_type or known
    if device != "cpu":
        return ProbeResult(Need.NOT_APPLICABLE, f"the device is {device}")
    from lmcache.utils import EngineType
    from lmcache.v1 import gpu_connector
    from lmcache.v1.config import LMCacheEngineConfig

    # Chunks of one block suit any block size: the engine's own chunk size is checked at its turn.
    config = LMCacheEngineConfig.from_defaults(chunk_size=setting.block_size or 256)
    try:
        mover = gpu_connector.CreateGPUConnector(config, _probe_metadata(), EngineType.VLLM)
    except RuntimeError as exc:
        if "No supported" not in str(exc):
            raise
        return ProbeResult(Need.NEEDED, f"CreateGPUConnector: {exc}")
    return ProbeResult(Need.NOT_NEEDED, f"CreateGPUConnector gives {type(mover).__name__}")


def guard(_setting: Setting) -> str | None:
    """Refuse a CPU engine on a release that knows no CPU at all."""
    if _lmcache_device() is None:
        return "an engine on a CPU, with an LMCache that starts on cards only (CPU: from 0.4.7)"
    return None


def apply(setting: Setting) -> str:
    """Give CreateGPUConnector a CPU branch, and stamp the blocks' layout on every cache key."""
    from lmcache import torch_device_type
    from lmcache.utils import EngineType
    from lmcache.v1 import cache_engine, gpu_connector

    original, check_layerwise = (
        gpu_connector.CreateGPUConnector,
        cache_engine.assert_layerwise_gpu_connector,
    )

    def create(config: Any, metadata: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine != EngineType.VLLM or torch_device_type != "cpu":
            return original(config, metadata, engine, *args, **kwargs)
        mover = make_mover(config, metadata, setting)
        if metadata.model_name != _PROBE_MODEL:
            _made[:] = [mover]
        return mover

    def assert_layerwise(mover: Any) -> None:
        from pdkit_connector.in_engine.cpu_mover import LayerwiseBlockMover

        if not isinstance(mover, LayerwiseBlockMover):
            check_layerwise(mover)

    gpu_connector.CreateGPUConnector = create
    cache_engine.assert_layerwise_gpu_connector = assert_layerwise
    replace_method(cache_engine.LMCacheEngine, "retrieve", as_miss)
    tag = layout_tag(setting)
    _stamp_keys(tag)
    return f"whole-block CPU mover, keys tagged {tag}"


def make_mover(config: Any, metadata: Any, setting: Setting) -> Any:
    """Return the mover for an engine; raise UnsupportedSetting where bytes could be misplaced."""
    from pdkit_connector.in_engine.cpu_mover import BlockMover, LayerwiseBlockMover

    block_size = setting.block_size or int(config.chunk_size)
    check_config(config, metadata, block_size, setting.kv_cache_specs)
    num_layers, _, _, kv_heads, head_size = metadata.kv_shape
    geometry = Geometry(num_layers, kv_heads, block_size, head_size, metadata.kv_dtype.itemsize)
    return (LayerwiseBlockMover if config.use_layerwise else BlockMover)(geometry)


def check_config(
    config: Any, metadata: Any, block_size: int, kv_cache_specs: tuple[str, ...] | None
) -> None:
    """Raise UnsupportedSetting on what whole-block copies cannot serve."""
    if config.chunk_size % block_size:
        raise UnsupportedSetting(
            f"LMCache's chunk_size {config.chunk_size} is not a multiple of vLLM's block size "
            f"{block_size}; set chunk_size to a multiple, or --block-size to a divisor"
        )
    refusals = {
        "MLA models": metadata.use_mla,
        "save_unfull_chunk: true (a partial chunk ends inside a block)": config.save_unfull_chunk,
        "enable_blending: true": config.enable_blending,
        "enable_pd: true": config.enable_pd,
        f"remote_serde {config.remote_serde} (only naive keeps bytes)": config.remote_serde
        != "naive",
        f"KV cache groups {kv_cache_specs} (only one full-attention group)": kv_cache_specs
        not in (None, ("FullAttentionSpec",)),
    }
    if refused := [name for name, present in refusals.items() if present]:
        raise UnsupportedSetting(f"the CPU mover does not serve {'; '.join(refused)}")


def check_kv_caches(kv_caches: Mapping[str, Any]) -> None:
    """Check vLLM's tensors before their first use; raise UnsupportedSetting to refuse them.

    Layerwise copies go by position while vLLM calls by layer, so the order must be that of layers.
    """
    for mover in _made:
        mover.register(list(kv_caches.values()))
    order = [[int(part) for part in re.findall(r"\d+", name)] for name in kv_caches]
    if order != sorted(order) or len({tuple(part) for part in order}) != len(order):
        raise UnsupportedSetting(f"vLLM's KV tensors are not in layer order: {list(kv_caches)}")


def layout_tag(setting: Setting) -> str:
    """Name the inside of a block: equal tags mean that bytes of one engine suit another.

    vLLM's CPU attention picks the layout by instruction set, block size and data type, and nothing
    holds it to keep a layout from one release to the next.
    """
    if setting.block_size is None:
        return "unknown"
    from vllm import __version__ as vllm_version

    release = vllm_version.partition("+")[0]
    return (
        f"{_OBJECT_LAYOUT}-cpu-{_attention_isa(setting)}-{setting.block_size}"
        f"-{setting.cache_dtype}-vllm{release}"
    )


def _lmcache_device() -> str | None:
    try:
        from lmcache import torch_device_type
    except ImportError:
        return None
    return str(torch_device_type)


def _attention_isa(setting: Setting) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype = setting.model_dtype
        return str(_get_attn_isa(dtype, setting.block_size, setting.head_size, setting.cache_dtype))
    except (ImportError, TypeError):
        # A vLLM without this function: the machine is the nearest thing that decides.
        return platform.machine()


def _stamp_keys(tag: str) -> None:
    from lmcache.v1.token_database import TokenDatabase

    make_key = TokenDatabase._make_key_by_hash

    def make_tagged_key(self: Any, chunk_hash: Any, request_configs: Any = None) -> Any:
        return make_key(self, chunk_hash, {**(request_configs or {}), LAYOUT_TAG: tag})

    TokenDatabase._make_key_by_hash = make_tagged_key


def _probe_metadata() -> Any:
    import torch
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(
        model_name=_PROBE_MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(1, 2, 256, 1, 32),
    )


FIX = Fix(
    id="B17",
    title="no CPU mover in LMCache's in-process mode",
    link="none",
    reason=(
        "On a CPU, CreateGPUConnector raises, LMCache comes up without an engine, nothing is "
        "stored or loaded, and every lookup waits for its time-out. The fix copies whole vLLM "
        "blocks as opaque bytes, and marks keys with the block layout so that no other layout is "
        "ever read."
    ),
    probe=probe,
    apply=apply,
    guard=guard,
    on_kv_caches=check_kv_caches,
)
