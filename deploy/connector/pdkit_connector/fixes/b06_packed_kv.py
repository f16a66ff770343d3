"""B6: LMCache's in-process mover takes only one of the two planes of packed KV blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from pdkit_connector.errors import UnsupportedSetting
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.packed_kv import PackedMover, common_layout, is_packed
from pdkit_connector.in_engine.partial_loads import as_miss
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

LINK = "https://github.com/LMCache/LMCache/issues/4463"
UNTESTED = "shown by emulated addresses, untested on hardware"

_DEVICES = (None, "cuda")  # vLLM calls AMD's cards by the same name
_MOVER = "VLLMPagedMemGPUConnectorV2"
# What the code of a mover that tells packed KV from split KV would name.
_AWARE = frozenset({"is_fused_packed", "get_kv_size", "kv_size", "is_packed"})
_OTHER_MOVERS = ("use_layerwise", "use_gpu_connector_v3", "enable_blending")

# What the fix was applied for, for the check of vLLM's tensors that follows.
_applied_for: list[Setting] = []


def probe(setting: Setting) -> ProbeResult:
    """See whether the plain mover knows packed KV from split KV at all."""
    if setting.device_type not in _DEVICES:
        return ProbeResult(Need.NOT_APPLICABLE, f"the device is {setting.device_type}")
    mover = _mover_class()
    if mover is None:
        return ProbeResult(Need.NOT_APPLICABLE, f"this LMCache has no {_MOVER}")
    if getattr(mover.to_gpu, "moves_packed", False):
        return ProbeResult(Need.NOT_NEEDED, "packed KV moves row by row")
    if known := sorted(_AWARE & _names(mover)):
        return ProbeResult(Need.NOT_NEEDED, f"{_MOVER} itself asks {', '.join(known)}")
    return ProbeResult(Need.NEEDED, f"{_MOVER} moves packed KV as if K and V were apart")


def apply(setting: Setting) -> str:
    """Send packed KV through rows of one head; any other KV goes the way it went."""
    from lmcache.v1.cache_engine import LMCacheEngine

    mover: Any = _mover_class()
    replace_method(LMCacheEngine, "retrieve", as_miss)
    mover.to_gpu = _packed_or(mover.to_gpu, PackedMover.load)
    mover.from_gpu = _packed_or(mover.from_gpu, PackedMover.store)
    _applied_for[:] = [setting]
    return f"packed KV moves row by row; {UNTESTED}"


def _packed_or(original: Callable[..., None], move: Callable[..., None]) -> Callable[..., None]:
    def transfer(self: Any, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        layers = kwargs.get("kvcaches", self.kvcaches)
        # The mover of rows is of this class too; its own layers have three dimensions.
        if not is_packed(layers):
            return original(self, memory_obj, start, end, **kwargs)
        packed = getattr(self, "_pdkit_packed", None)
        if packed is None or not packed.serves(layers):
            packed = self._pdkit_packed = PackedMover(self, layers)
        return move(packed, memory_obj, start, end, kwargs)

    vars(transfer)["moves_packed"] = True
    return transfer


def check_kv_caches(kv_caches: Mapping[str, Any]) -> None:
    """Refuse packed KV that the fix does not serve; log a warning where it does."""
    layers = list(kv_caches.values())
    packed = [layer for layer in layers if is_packed([layer])]
    if not packed or packed[0].device.type != "cuda":
        return
    setting = _applied_for[-1] if _applied_for else Setting()
    try:
        _check_setting(setting)
        layout = common_layout(layers)
        if setting.block_size not in (None, layout.block_size):
            raise UnsupportedSetting(f"{layout} in a vLLM with blocks of {setting.block_size}")
        if setting.head_size not in (None, layout.head_size):
            raise UnsupportedSetting(f"{layout} of a model with heads of {setting.head_size}")
    except UnsupportedSetting as exc:
        raise UnsupportedSetting(
            f"{exc}. vLLM packs K and V into one plane, of which LMCache would move half (B6, "
            f"{LINK}). Use a vLLM before 0.26, or the setting that the kit fixes: plain "
            "mode in layout LBNHC or LBHNC"
        ) from exc
    get_logger().warning(
        "pdkit-connector WARNING vLLM's KV is packed (%s) and moves by fix B6, %s", layout, UNTESTED
    )


def _check_setting(setting: Setting) -> None:
    if other := [name for name in _OTHER_MOVERS if setting.lmcache_value(name)]:
        raise UnsupportedSetting(f"LMCache's mover for {', '.join(other)} takes no packed KV")
    for group in getattr(setting.kv_cache_config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
            for name in ("num_head_slots", "state_content_bytes"):
                if getattr(one, name, None) is not None:
                    raise UnsupportedSetting(
                        f"this attention backend arranges blocks its own way ({name} "
                        f"{getattr(one, name)})"
                    )


def _mover_class() -> Any:
    for module in ("lmcache.v1.gpu_connector.gpu_connectors", "lmcache.v1.gpu_connector"):
        try:
            return getattr(importlib.import_module(module), _MOVER, None)
        except ModuleNotFoundError as exc:
            if not exc.name or not module.startswith(exc.name):
                raise
    return None


def _names(owner: type) -> set[str]:
    found: set[str] = set()
    for value in vars(owner).values():
        function = getattr(value, "__func__", value)
        function = getattr(function, "__wrapped__", function)
        found |= set(getattr(getattr(function, "__code__", None), "co_names", ()))
    return found


FIX = Fix(
    id="B6",
    title="only half of packed KV is moved",
    link=LINK,
    reason=(
        "Since 0.26 vLLM keeps K and V of a block in one plane, and LMCache's in-process mover, "
        "which expects two, moves half of the bytes or none, so that answers are silently wrong "
        "or the engine stops. The fix moves K and V as rows of one head through the transfer that "
        "LMCache has for MLA. It is shown by an emulation of the kernels' addresses, not on "
        "hardware. Layerwise mode, other movers and other layouts are refused."
    ),
    probe=probe,
    apply=apply,
    on_kv_caches=check_kv_caches,
)
