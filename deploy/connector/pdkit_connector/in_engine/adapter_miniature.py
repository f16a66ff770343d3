"""LMCache's vLLM adapter without services, enough for the calls of one engine step.

Probes ask it what the installed adapter does; it starts nothing and needs no configuration.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.layer_steps import ADAPTER, Inert, bind, on_cpu, silent
from pdkit_connector.log import NAME

BLOCK, CHUNK = 4, 8
# The block of a request that was preempted; its new ones are numbered from 1.
LOST_BLOCK = 99
_SERVICES = ("lmcache_engine", "lookup_client", "lookup_server", "lmcache_engine_metadata")


class IdleEngine:
    """An LMCache engine that stores and finds nothing."""

    def __init__(self) -> None:
        self.lookup_pins: dict[str, Any] = {}
        self.storage_manager: Any = None

    def lookup_unpin(self, req_id: str) -> None:
        """Release nothing, as nothing is pinned."""

    def post_init(self, **_more: Any) -> None:
        """Begin nothing; the first adapters call this in every step."""


class LookupClient:
    """Finds as many tokens as it was told, and notes who asked."""

    def __init__(self, hits: int = 0) -> None:
        self.hits = hits
        self.asked: list[str] = []
        self.tokens: Any = ()

    def lookup(self, tokens: Any, lookup_id: str, **_more: Any) -> int:
        """Return the number of tokens found."""
        self.asked.append(lookup_id)
        self.tokens = tokens
        return self.hits

    def lookup_cache(self, **_more: Any) -> int:
        """Return None: no result is kept."""
        return -1

    def clear_lookup_status(self, _lookup_id: str) -> None:
        """Forget nothing, as nothing is kept."""

    def cancel_lookup(self, _lookup_id: str) -> None:
        """Cancel nothing, as nothing is under way."""

    def supports_producer_reuse(self) -> bool:
        """Return True: producers may load."""
        return True


def miniature(*, engine: Any = None, client: Any = None, **own: Any) -> Any:
    """Return an LMCacheConnectorV1Impl with blocks of 4 and chunks of 8 tokens.

    `own` sets or replaces attributes; `save_decode_cache` is a setting of LMCache's.
    """
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    impl: Any = object.__new__(LMCacheConnectorV1Impl)
    save_decode_cache = own.pop("save_decode_cache", False)
    services = dict.fromkeys(_SERVICES) | {"lmcache_engine": engine, "lookup_client": client}
    impl._manager = SimpleNamespace(**services)
    for name, service in services.items():
        # Properties that ask the manager since there is one, plain attributes before.
        if not isinstance(getattr(type(impl), name, None), property):
            setattr(impl, name, service)
    impl.config = SimpleNamespace(
        priority_limit=None,
        save_decode_cache=save_decode_cache,
        min_retrieve_tokens=0,
        get_extra_config_value=lambda _name, default=None: default,
    )
    impl._save_decode_cache = save_decode_cache
    impl.__dict__.update(_plain_state(), **own)
    return impl


def _plain_state() -> dict[str, Any]:
    return {
        "kv_role": "kv_both",
        "device": "cpu",
        "async_loading": False,
        "use_layerwise": False,
        "enable_blending": False,
        "force_skip_save": False,
        "skip_last_n_tokens": 0,
        "num_layers": 2,
        "current_layer": 0,
        "kv_caches": {"layer": None},
        "load_specs": {},
        "layerwise_retrievers": [],
        "layerwise_storers": [],
        "_layerwise_save_storers": {},
        "_block_size": BLOCK,
        "_lmcache_chunk_size": CHUNK,
        "_discard_partial_chunks": True,
        "_max_tokens_per_load": 0,
        "_request_trackers": {},
        "_unfinished_requests": {},
        "_requests_priority": {},
        "_invalid_block_ids": set(),
        "_parent": SimpleNamespace(),
        "_stats_monitor": Inert(),
    }


def idle_adapter(engine: Any, *, role: str = "kv_both") -> Any:
    """Return the adapter's worker half on `engine`, layerwise.

    It has no list of storers where the constructor of this release makes none.
    """
    import torch

    layers = {f"layer{i}": torch.empty(0) for i in range(engine.num_layers)}
    adapter = miniature(
        engine=engine, kv_role=role, kv_caches=layers, num_layers=len(layers), use_layerwise=True
    )
    for name in ("layerwise_storers", "_layerwise_save_storers"):
        if not _constructor_sets(name):
            delattr(adapter, name)
    return adapter


def _constructor_sets(name: str) -> bool:
    """Tell whether the adapter's constructor, or a method it delegates to, sets an attribute."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl as Adapter

    methods = (getattr(Adapter, method, None) for method in ("__init__", "_init_connector_state"))
    codes = (inspect.unwrap(method).__code__ for method in methods if method is not None)
    return any(name in code.co_names for code in codes)


def bind_request(impl: Any, *, slots: int, save: int, load: int) -> None:
    """Give the worker a step of request "probe" with two chunks of tokens.

    `slots` of them have a slot, the first `load` are to be loaded, and those from `save` on stored.
    """
    import torch
    from lmcache.integration.vllm import vllm_v1_adapter as adapter

    request = adapter.ReqMeta(
        req_id="probe",
        token_ids=list(range(2 * CHUNK)),
        slot_mapping=on_cpu(torch.arange(slots)),
        is_last_prefill=True,
        save_spec=adapter.SaveSpec(save, True),
        load_spec=adapter.LoadSpec(0, load, True),
    )
    bind(impl, request)


def new_request(tokens: int, **more: Any) -> Any:
    """Return a request "probe" with the ids 0 to `tokens` - 1 for its tokens, as vLLM has it."""
    ids = list(range(tokens))
    facts = {
        "request_id": "probe",
        "prompt_token_ids": ids,
        "all_token_ids": ids,
        "num_tokens": tokens,
        # The first adapters read the parameters without asking whether there are any.
        "sampling_params": SimpleNamespace(extra_args=None),
        **more,
    }
    return SimpleNamespace(**facts)


def resumed_step(impl: Any, tokens: int, *, computed: int, spec: Any, scheduled: int = 1) -> Any:
    """Build the metadata of a step in which request "probe" goes on after a preemption.

    `spec` is the LoadSpec that the lookup and the allocation left.
    """
    return _cached_step(impl, tokens, tokens, computed, scheduled, spec)


def running_step(impl: Any, tokens: int, *, tracked: int, computed: int) -> Any:
    """Build the metadata of a step that adds a token to request "probe", already running."""
    return _cached_step(impl, tokens, tracked, computed, 1, None)


def _cached_step(
    impl: Any, tokens: int, tracked: int, computed: int, scheduled: int, spec: Any
) -> Any:
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    blocks = list(range(1, 2 + tokens // BLOCK))
    request = new_request(tokens, num_computed_tokens=computed)
    impl._unfinished_requests["probe"] = request
    impl._request_trackers["probe"] = RequestTracker(
        "probe", tokens, list(range(tracked)), [LOST_BLOCK] if spec else list(blocks)
    )
    if spec is not None:
        impl.load_specs["probe"] = spec
    cached = SimpleNamespace(
        req_ids=["probe"],
        resumed_req_ids={"probe"} if spec else set(),
        new_block_ids=[(blocks,) if spec else None],
    )
    output = SimpleNamespace(
        finished_req_ids=(),
        scheduled_new_reqs=(),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"probe": scheduled},
    )
    with quiet():
        return impl.build_connector_meta(output)


def quiet() -> AbstractContextManager[None]:
    """Keep the adapter's log quiet, and that of the fixes around it: a probe is no event."""
    return silent(ADAPTER, NAME)
