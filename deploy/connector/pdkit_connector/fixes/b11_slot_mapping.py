"""B11: a request with fewer slots than tokens ends the engine's core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import (
    BLOCK,
    CHUNK,
    IdleEngine,
    bind_request,
    miniature,
    quiet,
    running_step,
)
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.in_engine.step_requests import is_to_load, of_step, running, unpin, without
from pdkit_connector.log import get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """Show the worker a request with a slot too few, and the scheduler one that vLLM set back."""
    asserting = [name for name in _CALLS if _asserts(name)]
    if asserting:
        return ProbeResult(
            Need.NEEDED, f"a slot too few is an AssertionError in {', '.join(asserting)}"
        )
    tracked = _tracked_when_set_back()
    if tracked != BLOCK + 1:
        return ProbeResult(Need.NEEDED, f"set back to {BLOCK} tokens, a request has {tracked}")
    return ProbeResult(Need.NOT_NEEDED, "such a request is neither loaded nor stored")


def apply(_setting: Setting) -> str:
    """Keep such requests from loads and stores, and the adapter's list in step with vLLM's."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    for name, without_such in _CALLS.items():
        if _asserts(name):
            replace_method(LMCacheConnectorV1Impl, name, without_such)
    if _tracked_when_set_back() != BLOCK + 1:
        replace_method(LMCacheConnectorV1Impl, "build_connector_meta", _set_back)
    return "such a request is not stored, and computed where it was to be loaded"


def _desynced(request: Any) -> bool:
    return len(request.slot_mapping) != len(request.token_ids)


def _loading_none(load: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    for request in of_step(self):
        if _desynced(request):
            _report(self, request)
            request.load_spec = None
    load(self, *args, **kwargs)


def _report(impl: Any, request: Any) -> None:
    """Tell vLLM that nothing was loaded from the first block on that was to be."""
    get_logger().error(
        "pdkit-connector ERROR request %s has %d slots for %d tokens; not loaded, not stored",
        request.req_id,
        len(request.slot_mapping),
        len(request.token_ids),
    )
    if not is_to_load(request):
        return
    spec = request.load_spec
    slots = request.slot_mapping[spec.vllm_cached_tokens : spec.lmcache_cached_tokens]
    if len(slots) == 0:
        slots = request.slot_mapping[-1:]
    if len(slots) == 0:
        # Without a block to name, vLLM would take unwritten KV for loaded.
        raise RuntimeError(f"request {request.req_id} is to be loaded and has no slots")
    impl._invalid_block_ids.update(slot // impl._block_size for slot in slots.tolist())


def _saving_none(save: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if not self.use_layerwise:
        return save(self, *args, **kwargs)
    with without(self, _desynced):
        return save(self, *args, **kwargs)


def _waiting_for_none(wait: Callable[[Any], None], self: Any) -> None:
    with without(self, _desynced) as taken:
        wait(self)
    unpin(self, taken)


_CALLS: dict[str, Callable[..., Any]] = {
    "start_load_kv": _loading_none,
    "save_kv_layer": _saving_none,
    "wait_for_save": _waiting_for_none,
}


def _set_back(build: Callable[[Any, Any], Any], self: Any, scheduler_output: Any) -> Any:
    """Shorten the adapter's list of a request's tokens where vLLM gave some up.

    A load that fails sets a request back. Where the adapter then adds the same tokens once more,
    its list has more tokens than slots.
    """
    for _, request, tracker in running(self, scheduler_output):
        if (computed := request.num_computed_tokens) < len(tracker.token_ids):
            tracker.token_ids = list(request.all_token_ids[:computed])
            tracker.num_saved_tokens = min(tracker.num_saved_tokens, computed)
    return build(self, scheduler_output)


def _tracked_when_set_back() -> int:
    """Return the tokens that the adapter counts a step after a request was set back to a block."""
    impl = miniature(client=object())
    running_step(impl, 9, tracked=8, computed=BLOCK)
    return len(impl._request_trackers["probe"].token_ids)


def _asserts(name: str) -> bool:
    """Tell whether a call of the worker's meets a slot too few with an assertion."""
    impl = miniature(engine=IdleEngine(), use_layerwise=name == "save_kv_layer")
    bind_request(impl, slots=2 * CHUNK - 1, save=0, load=2 * CHUNK)
    arguments = {
        "start_load_kv": (SimpleNamespace(attn_metadata=object()),),
        "save_kv_layer": ("layer", None, None),
    }
    try:
        with quiet():
            getattr(impl, name)(*arguments.get(name, ()))
    except AssertionError:
        return True
    return False


FIX = Fix(
    id="B11",
    title="a request with fewer slots than tokens ends the engine's core",
    link="https://github.com/LMCache/LMCache/issues/2327",
    reason=(
        "The adapter's list of a request's tokens can become longer than its blocks, as when vLLM "
        "sets a request back after a failed load. An assertion in the worker then ends the "
        "engine's core, although only one request's cache is affected."
    ),
    probe=probe,
    apply=apply,
)
