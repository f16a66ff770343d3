"""B19: what a step computes on KV that failed to load is stored as if it were right."""

from __future__ import annotations

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
from pdkit_connector.in_engine.step_requests import unpin, without
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

# Ids of the requests whose loads fell short in this step, kept on the adapter until it stored.
_FAILED = "_pdkit_failed_loads"


class _Stored(Exception):
    """Raised by a probe's store, to look no further."""


def probe(_setting: Setting) -> ProbeResult:
    """Let a load find nothing, and see whether the step then stores."""
    try:
        with quiet():
            _step_without_keys()
    except _Stored:
        return ProbeResult(Need.NEEDED, "a request is stored however its load went")
    return ProbeResult(Need.NOT_NEEDED, "a request whose load failed is not stored in that step")


def apply(_setting: Setting) -> str:
    """Store nothing of a request in a step in which its load fell short."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "record_failed_blocks", _remembering)
    replace_method(LMCacheConnectorV1Impl, "wait_for_save", _without_failed)
    return "a request whose load failed is not stored in that step"


def _remembering(
    record: Callable[..., set[int]], self: Any, request_id: str, *args: Any, **kwargs: Any
) -> set[int]:
    self.__dict__.setdefault(_FAILED, set()).add(request_id)
    return record(self, request_id, *args, **kwargs)


def _without_failed(wait: Callable[[Any], None], self: Any) -> None:
    failed = self.__dict__.pop(_FAILED, None)
    if failed is None:
        wait(self)
        return
    with without(self, lambda request: request.req_id in failed) as taken:
        wait(self)
    unpin(self, taken)


def _step_without_keys() -> None:
    import torch

    class Engine(IdleEngine):
        def retrieve(self, tokens: Any, *_args: Any, **_kwargs: Any) -> Any:
            """Find nothing."""
            return torch.zeros(len(tokens), dtype=torch.bool)

        def store(self, *_args: Any, **_kwargs: Any) -> None:
            """Signal that something is stored."""
            raise _Stored

    impl = miniature(engine=Engine())
    bind_request(impl, slots=2 * CHUNK, save=CHUNK, load=CHUNK)
    impl.start_load_kv(SimpleNamespace(attn_metadata=object()))
    impl.wait_for_save()


FIX = Fix(
    id="B19",
    title="KV computed on a failed load is stored, and others load it",
    link="none",
    reason=(
        "When chunks are gone between lookup and load, vLLM learns of it after the step, and "
        "drops or repeats what the request computed. By then the adapter has stored the step's "
        "new chunks: they were computed on unwritten KV, but other requests find and load them."
    ),
    probe=probe,
    apply=apply,
)
