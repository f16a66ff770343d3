"""B18: a layerwise load that falls short is never reported, and vLLM attends to unwritten KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import idle_adapter
from pdkit_connector.in_engine.layer_steps import (
    ADAPTER,
    Steps,
    bind,
    idle_engine,
    probe_request,
    replace_method,
    retrieve_steps,
    run_layers,
    silent,
)
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe

# Slots that a retrieve did not fill, kept on the engine until vLLM asks for failed blocks.
_UNFILLED = "_pdkit_unfilled_slots"


def probe(setting: Setting) -> ProbeResult:
    """Let the adapter load a request whose keys are gone, and ask which blocks failed."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    try:
        with silent(ADAPTER):
            failed = _blocks_after_miss()
    except Exception as exc:  # noqa: BLE001 - B2d is one of many ways to fail
        return ProbeResult(Need.NEEDED, f"a load without keys raises {describe(exc)}")
    if failed == {1, 2}:
        return ProbeResult(Need.NOT_NEEDED, "a load without keys reports its blocks")
    return ProbeResult(
        Need.NEEDED, f"a load without keys reports blocks {sorted(failed)} of [1, 2]"
    )


def apply(_setting: Setting) -> str:
    """Remember the slots that a retrieve leaves unfilled, and report their blocks to vLLM."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "retrieve_layer", _watched)
    replace_method(LMCacheConnectorV1Impl, "get_block_ids_with_load_errors", _reporting)
    return "unfilled blocks are reported to vLLM"


def _watched(
    retrieve_layer: Callable[..., Steps], self: Any, tokens: Any, mask: Any = None, **kwargs: Any
) -> Steps:
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


def _remember(engine: Any, mask: Any, filled: Any, kwargs: dict[str, Any]) -> None:
    unfilled = ~filled if mask is None else mask & ~filled
    unfilled[: kwargs.get("vllm_cached_tokens", 0)] = False
    if unfilled.any():
        slots = kwargs["slot_mapping"][unfilled].tolist()
        engine.__dict__.setdefault(_UNFILLED, []).extend(slots)


def _reporting(ask: Callable[[Any], set[int]], self: Any) -> set[int]:
    failed = ask(self)
    if self.lmcache_engine is not None:
        slots = self.lmcache_engine.__dict__.pop(_UNFILLED, [])
        failed |= {slot // self._block_size for slot in slots}
    return failed


def _blocks_after_miss() -> set[int]:
    """Return the blocks reported after a load of two blocks, 1 and 2, whose keys are gone."""
    adapter = idle_adapter(idle_engine())
    bind(adapter, probe_request(load=True))
    run_layers(adapter)
    return set(adapter.get_block_ids_with_load_errors())


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
