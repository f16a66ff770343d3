"""B18: a layerwise load that falls short is never reported, and vLLM attends to unwritten KV."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from pdkit_connector.layer_steps import Steps, idle_engine, replace_method, retrieve_steps, silent
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Finding, Fix, Verdict, describe
from pdkit_connector.setting import Setting

# Slots that a retrieve did not fill, kept on the engine until vLLM asks for failed blocks.
_UNFILLED = "_pdkit_unfilled_slots"
_BLOCK = 4
_ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"


def probe(setting: Setting) -> Finding:
    """Let the adapter load a request whose keys are gone, and ask which blocks failed."""
    if setting.lmcache_value("use_layerwise") is False:
        return Finding(Verdict.NOT_APPLICABLE, "use_layerwise is off")
    try:
        with silent(_ADAPTER):
            failed = _blocks_after_miss()
    except Exception as exc:  # noqa: BLE001 - B2d is one of many ways to fail
        return Finding(Verdict.NEEDED, f"a load without keys raises {describe(exc)}")
    if failed == {1, 2}:
        return Finding(Verdict.NOT_NEEDED, "a load without keys reports its blocks")
    return Finding(Verdict.NEEDED, f"a load without keys reports blocks {sorted(failed)} of [1, 2]")


def apply(_setting: Setting) -> str:
    """Remember the slots that a retrieve leaves unfilled, and report their blocks to vLLM."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "retrieve_layer", _watched)
    replace_method(LMCacheConnectorV1Impl, "get_block_ids_with_load_errors", _reporting)
    return "unfilled blocks are reported to vLLM"


def _watched(retrieve_layer: Callable[..., Steps]) -> Callable[..., Steps]:
    @wraps(retrieve_layer)
    def watch(self: Any, tokens: Any, mask: Any = None, **kwargs: Any) -> Steps:
        import torch

        total, taken, filled = retrieve_steps(self.num_layers), 0, None
        try:
            for filled in retrieve_layer(self, tokens, mask, **kwargs):
                taken += 1
                if taken == total:
                    break
                yield filled
        except Exception as exc:  # noqa: BLE001 - the request fails, the engine lives on
            get_logger().error("pdkit-connector ERROR layerwise load failed: %s", describe(exc))
        if taken < total or filled is None:
            filled = torch.zeros(len(tokens), dtype=torch.bool)
        yield from [None] * (total - taken - 1)
        _remember(self, mask, filled, kwargs)
        yield filled

    return watch


def _remember(engine: Any, mask: Any, filled: Any, kwargs: dict[str, Any]) -> None:
    unfilled = ~filled if mask is None else mask & ~filled
    unfilled[: kwargs.get("vllm_cached_tokens", 0)] = False
    if unfilled.any():
        slots = kwargs["slot_mapping"][unfilled].tolist()
        engine.__dict__.setdefault(_UNFILLED, []).extend(slots)


def _reporting(ask: Callable[[Any], set[int]]) -> Callable[[Any], set[int]]:
    @wraps(ask)
    def report(self: Any) -> set[int]:
        failed = ask(self)
        if self.lmcache_engine is not None:
            slots = self.lmcache_engine.__dict__.pop(_UNFILLED, [])
            failed |= {slot // self._block_size for slot in slots}
        return failed

    return report


def _blocks_after_miss() -> set[int]:
    """Return the blocks reported after a load of two blocks, 1 and 2, whose keys are gone."""
    import torch
    from lmcache.integration.vllm import vllm_v1_adapter as adapter

    request = SimpleNamespace(
        req_id="probe",
        token_ids=[1] * 2 * _BLOCK,
        slot_mapping=torch.arange(_BLOCK, 3 * _BLOCK),
        load_spec=SimpleNamespace(
            can_load=True, vllm_cached_tokens=0, lmcache_cached_tokens=2 * _BLOCK
        ),
    )
    metadata = adapter.LMCacheConnectorMetadata(requests=[request])
    engine = idle_engine()
    impl: Any = object.__new__(adapter.LMCacheConnectorV1Impl)
    impl._parent = SimpleNamespace(_get_connector_metadata=lambda: metadata)
    impl._manager = SimpleNamespace(lmcache_engine=engine)
    impl._stats_monitor = engine.stats_monitor
    impl.kv_caches = {"layer": torch.empty(0)}
    impl.device, impl.num_layers, impl._block_size = "cpu", engine.num_layers, _BLOCK
    impl._lmcache_chunk_size = 2 * _BLOCK
    impl.use_layerwise, impl.enable_blending, impl.async_loading = True, False, False
    impl._invalid_block_ids = set()
    impl.start_load_kv(SimpleNamespace(attn_metadata=object()))
    for _ in range(engine.num_layers):
        impl.wait_for_layer_load("layer")
    return set(impl.get_block_ids_with_load_errors())


FIX = Fix(
    id="B18",
    title="a layerwise load that falls short is not reported",
    link="none",
    reason=(
        "The plain load compares what arrived with what vLLM expects and reports the blocks that "
        "failed; the layerwise load does not, so a chunk evicted between lookup and load leaves "
        "unwritten blocks that vLLM takes for valid KV: wrong output, no error."
    ),
    probe=probe,
    apply=apply,
    # After B2d and B2e, whose masks it reads.
    rank=200,
)
