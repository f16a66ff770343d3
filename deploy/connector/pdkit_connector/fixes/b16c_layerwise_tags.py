"""B16c: layerwise mode stores and loads KV without the request's tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import idle_adapter, quiet
from pdkit_connector.in_engine.layer_steps import (
    Steps,
    bind,
    idle_engine,
    probe_request,
    replace_method,
    silent,
)
from pdkit_connector.in_engine.step_requests import of_step
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_PROBE_TAGS = {"lmcache.tag.pdkit": "probe"}
# What the worker calls first of each, with what a probe hands over.
_CALLS: dict[str, tuple[Any, ...]] = {
    "start_load_kv": (SimpleNamespace(attn_metadata=object()),),
    "save_kv_layer": ("layer0", None, None),
}


def probe(setting: Setting) -> ProbeResult:
    """Store and load a request that has a tag, and see of which keys it is made."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    untagged = [
        told
        for told, call in (("stored", "save_kv_layer"), ("loaded", "start_load_kv"))
        if not _passes_tags(call)
    ]
    if untagged:
        return ProbeResult(Need.NEEDED, f"a layer is {' and '.join(untagged)} without its tags")
    return ProbeResult(Need.NOT_NEEDED, "layers are stored and loaded with their tags")


def apply(_setting: Setting) -> str:
    """Let a request's tokens carry its tags to where keys are made of them."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.cache_engine import LMCacheEngine

    # Newer vLLM begins a step without loads by its stores.
    for name in _CALLS:
        replace_method(LMCacheConnectorV1Impl, name, _labelling)
    replace_method(LMCacheEngine, "store_layer", _with_configs)
    replace_method(LMCacheEngine, "retrieve_layer", _with_configs)
    return "tokens carry their request's tags"


class _Tokens(list[int]):
    """Tokens that know their request's configuration, as each beginning of them does.

    The adapter hands the engine nothing else of a request that all releases have in both calls.
    """

    def __init__(self, tokens: Sequence[int], configs: Mapping[str, Any]) -> None:
        super().__init__(tokens)
        self.configs = configs

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        return _Tokens(found, self.configs) if isinstance(item, slice) else found


def _labelling(call: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # A blended load makes a tensor of its tokens: nothing would be found of what had tags.
    if self.use_layerwise and not self.enable_blending:
        for request in of_step(self):
            if request.request_configs and type(request.token_ids) is list:
                request.token_ids = _Tokens(request.token_ids, request.request_configs)
    call(self, *args, **kwargs)


def _with_configs(
    move_layers: Callable[..., Steps], self: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Steps:
    if isinstance(tokens, _Tokens):
        kwargs["request_configs"] = tokens.configs
        tokens = list(tokens)
    return move_layers(self, tokens, *args, **kwargs)


def _passes_tags(call: str) -> bool:
    """Tell whether a call of the adapter's has keys made with the tags of its step's request."""
    asked = []

    def process_tokens(**kwargs: Any) -> Any:
        asked.append(kwargs.get("request_configs"))
        return iter(())

    engine = idle_engine()
    engine.token_database = SimpleNamespace(process_tokens=process_tokens)
    adapter = idle_adapter(engine)
    bind(adapter, probe_request(load=call == "start_load_kv", configs=_PROBE_TAGS))
    with quiet(), silent("lmcache.v1.cache_engine"), suppress(Exception):  # what else may be wrong
        getattr(adapter, call)(*_CALLS[call])
    return asked == [_PROBE_TAGS]


FIX = Fix(
    id="B16c",
    title="layerwise KV is stored without the request's tags",
    link="none",
    reason=(
        "A request's tags (lmcache.tag.*) are part of its keys. The vLLM adapter passes them to "
        "lookups and to plain stores and loads, but not to layerwise ones: what a request with "
        "tags stores is never found by another with the same, and is found by those without."
    ),
    probe=probe,
    apply=apply,
)
