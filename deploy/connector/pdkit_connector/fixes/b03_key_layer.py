"""B3: the text of a single layer's key cannot be read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from pdkit_connector.registry import Fix, Need, ProbeResult, describe
from pdkit_connector.setting import Setting

_NAME = "parse_cache_key"


def probe(_setting: Setting) -> ProbeResult:
    """Write keys as text and read them back."""
    from lmcache import utils

    if not hasattr(utils, _NAME):
        return ProbeResult(Need.NOT_APPLICABLE, "keys are never read back")
    for key in _samples():
        text = key.to_string()
        for name, parse in _bindings():
            try:
                read = parse(text)
            except ValueError as exc:
                return ProbeResult(Need.NEEDED, f"{name} on {text}: {describe(exc)}")
            if (type(read), read) != (type(key), key):
                return ProbeResult(Need.NEEDED, f"{name} on {text}: a {type(read).__name__}")
    return ProbeResult(Need.NOT_NEEDED, "keys with and without a layer are read back")


def apply(_setting: Setting) -> str:
    """Read the layer where the key's own text has it, in every module that reads keys."""
    changed = []
    for name, parse in _bindings():
        setattr(sys.modules[name], _NAME, _with_layer(parse))
        changed.append(name)
    return f"the layer is looked for after the dtype in {', '.join(changed)}"


def _with_layer(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    from lmcache.utils import CacheEngineKey, LayerCacheEngineKey

    # What a key without a layer has before its tags: one part a field that is in the text.
    parts_before_layer = len(next(_samples()).to_string().split("@"))

    @wraps(parse)
    def parse_key(key_str: str) -> CacheEngineKey | LayerCacheEngineKey:
        text = key_str.strip()
        parts = text.split("@")
        has_layer = len(parts) > parts_before_layer and parts[parts_before_layer].isdigit()
        kind = LayerCacheEngineKey if has_layer else CacheEngineKey
        return kind.from_string(text)

    return parse_key


def _bindings() -> list[tuple[str, Callable[[str], Any]]]:
    """Return the loaded LMCache modules that hold the function, with what they hold."""
    import lmcache.v1.protocol  # noqa: F401 - the reader on every release

    return [
        (name, vars(module)[_NAME])
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "lmcache" and callable(vars(module).get(_NAME))
    ]


def _samples() -> Any:
    """Yield keys: without a layer, with one, and both with a tag."""
    import torch
    from lmcache.utils import CacheEngineKey

    facts = {
        "fmt": "vllm",
        "model_name": "m",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": 12,
        "dtype": torch.bfloat16,
    }
    known = {field.name for field in fields(CacheEngineKey)}
    facts = {name: value for name, value in facts.items() if name in known}
    for tags in (None, {"lmcache.tag.t": "7"}):
        key = CacheEngineKey(**facts, request_configs=tags)
        yield key
        yield key.split_layers(12)[11]


FIX = Fix(
    id="B3",
    title="a single layer's key is not readable",
    link="https://github.com/LMCache/LMCache/pull/2598",
    reason=(
        "Keys got a dtype before the layer, and the reader of keys still looks for the layer in "
        "the dtype's place: every single layer's key is refused. Stores that read keys back (the "
        "LMCache server, GDS, raw blocks) lose layerwise KV; Redis does not read keys."
    ),
    probe=probe,
    apply=apply,
)
