"""B12: where LMCache failed to start, the first step ends the engine that goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import miniature, quiet
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import is_to_load
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.request_view import RequestView

Method = Callable[..., Any]


def probe(_setting: Setting) -> ProbeResult:
    """Take a step with neither engine nor lookup client."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    if not isinstance(getattr(LMCacheConnectorV1Impl, "lmcache_engine", None), property):
        return ProbeResult(Need.NOT_APPLICABLE, "a failed start raises, so vLLM does not go on")
    with quiet():
        failing = [name for name, call in _calls().items() if _raises(call)]
    if failing:
        return ProbeResult(Need.NEEDED, f"without an engine these raise: {', '.join(failing)}")
    return ProbeResult(Need.NOT_NEEDED, "without an engine a step loads and stores nothing")


def apply(_setting: Setting) -> str:
    """Let each call do nothing where what it needs is missing."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    for name, wrap in {
        "start_load_kv": _loading,
        "save_kv_layer": _without_engine,
        "wait_for_save": _without_engine,
        "get_num_new_matched_tokens": _finding_nothing,
        "update_state_after_alloc": _without_client,
        "build_connector_meta": _building_nothing,
        "request_finished": _finishing,
    }.items():
        replace_method(LMCacheConnectorV1Impl, name, wrap)
    return "without an engine a step loads and stores nothing"


def _loading(load: Method, self: Any, *args: Any, **kwargs: Any) -> None:
    if self.lmcache_engine is not None:
        load(self, *args, **kwargs)
        return
    # The scheduler's half may have started and found KV that nobody here can load.
    for request in self._parent._get_connector_metadata().requests:
        if is_to_load(request):
            slots = request.slot_mapping[request.load_spec.vllm_cached_tokens :].tolist()
            self._invalid_block_ids.update(slot // self._block_size for slot in slots)


def _without_engine(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    return None if self.lmcache_engine is None else method(self, *args, **kwargs)


def _without_client(method: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    return None if self.lookup_client is None else method(self, *args, **kwargs)


def _finding_nothing(match: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    return 0 if self.lookup_client is None else match(self, *args, **kwargs)


def _building_nothing(build: Method, self: Any, scheduler_output: Any) -> Any:
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata

    if self.lookup_client is None:
        return LMCacheConnectorMetadata()
    return build(self, scheduler_output)


def _finishing(finish: Method, self: Any, request: Any, block_ids: Any) -> Any:
    if self.lookup_client is None:
        # What an abort cancels was never begun.
        request = RequestView(request, status=None)
    return finish(self, request, block_ids)


def _calls() -> dict[str, Callable[[], Any]]:
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata
    from vllm.v1.request import RequestStatus

    metadata = LMCacheConnectorMetadata()
    parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
    output = SimpleNamespace(
        finished_req_ids=(),
        scheduled_new_reqs=(),
        scheduled_cached_reqs=[],
        num_scheduled_tokens={},
    )
    request = SimpleNamespace(
        request_id="probe", all_token_ids=[1], num_tokens=1, status=RequestStatus.FINISHED_ABORTED
    )
    impl = miniature(_parent=parent, async_loading=True)
    return {
        "start_load_kv": lambda: impl.start_load_kv(SimpleNamespace(attn_metadata=object())),
        "save_kv_layer": lambda: impl.save_kv_layer("layer", None, None),
        "wait_for_save": impl.wait_for_save,
        "get_num_new_matched_tokens": lambda: impl.get_num_new_matched_tokens(request, 0),
        "update_state_after_alloc": lambda: impl.update_state_after_alloc(request, 0),
        "build_connector_meta": lambda: impl.build_connector_meta(output),
        "request_finished": lambda: impl.request_finished(request, []),
    }


def _raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (AssertionError, AttributeError):
        return True
    return False


FIX = Fix(
    id="B12",
    title="after a failed start of LMCache the first step ends vLLM",
    link="https://github.com/LMCache/LMCache/issues/3337",
    reason=(
        "LMCache catches an error at its start and logs that vLLM will compute everything itself, "
        "but then the adapter asserts in every step that there are an engine and a lookup client."
    ),
    probe=probe,
    apply=apply,
)
