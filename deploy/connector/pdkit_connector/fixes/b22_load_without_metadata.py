"""B22: before a step that vLLM replays as a whole CUDA graph, nothing is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import (
    CHUNK,
    IdleEngine,
    bind_request,
    miniature,
    quiet,
)
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import is_to_load, of_step
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """Let the adapter load in a forward context that has no attention metadata."""
    if _loads_without_metadata():
        return ProbeResult(Need.NOT_NEEDED, "loads do not depend on attention metadata")
    return ProbeResult(Need.NEEDED, "without attention metadata a request is not loaded")


def apply(_setting: Setting) -> str:
    """Load what a request has to load, whatever the forward context."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "start_load_kv", _in_any_context)
    return "what a request has to load is loaded in any forward context"


def _in_any_context(
    load: Callable[..., None], self: Any, forward_context: Any, **kwargs: Any
) -> None:
    missing = forward_context.attn_metadata is None and any(map(is_to_load, of_step(self)))
    if missing:
        # The adapter only asks whether there are metadata; it uses none.
        forward_context = copy.copy(forward_context)
        forward_context.attn_metadata = {}
    load(self, forward_context, **kwargs)
    if missing and self.use_layerwise:
        _finish(self)


def _finish(impl: Any) -> None:
    """Load all layers now: a graph's replay calls none of the hooks that would."""
    for name in impl.kv_caches:
        impl.wait_for_layer_load(name)
    impl.layerwise_retrievers = []


def _loads_without_metadata() -> bool:
    import torch

    loaded: list[int] = []

    class Engine(IdleEngine):
        def retrieve(self, tokens: Any, *_args: Any, **_kwargs: Any) -> Any:
            """Find all tokens, and note that it was asked."""
            loaded.append(len(tokens))
            return torch.ones(len(tokens), dtype=torch.bool)

    impl = miniature(engine=Engine())
    bind_request(impl, slots=2 * CHUNK, save=2 * CHUNK, load=CHUNK)
    with quiet():
        impl.start_load_kv(SimpleNamespace(attn_metadata=None))
    return loaded == [CHUNK]


FIX = Fix(
    id="B22",
    title="nothing is loaded before a step that is one CUDA graph",
    link="none",
    reason=(
        "The adapter loads only where vLLM's forward context has attention metadata. vLLM's second "
        "model runner calls it outside of a forward context before it replays a full CUDA graph, "
        "as it does when a request has one token left to compute: a prompt of whole chunks, or of "
        "one token more. vLLM then attends to unwritten KV and counts it as a hit: wrong output, "
        "no error."
    ),
    probe=probe,
    apply=apply,
)
