"""Kinds of models whose KV the connector cannot move, detected from config.json.

Where config.json does not say it, fixes B17 and B20 look at the engine's KV and stop the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Families in which vLLM gives every layer the window; others mix it with full attention.
_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
_STATE_LAYER = re.compile(r"mamba|ssm|linear|recurrent|rwkv|conv|gdn")
_STATE_KEYS = (
    "attn_layer_period", "hybrid_override_pattern", "linear_attn_config", "linear_num_key_heads",
    "mamba_d_state", "ssm_cfg", "ssm_state_size", "state_size",
)  # fmt: skip
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")


@dataclass(frozen=True)
class Kind:
    """Properties of a model's layers that decide whether its KV can be moved.

    Attributes:
        window: sliding window of every layer; None if a layer has full attention.
        state: the config entry by which layers keep a state instead of KV; "" if there is none.
        mla: K and V of all heads are computed from one row per token.
    """

    window: int | None = None
    state: str = ""
    mla: bool = False


PLAIN = Kind()


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind that a config.json describes; multimodal ones nest their language model."""
    text = config.get("text_config") or config
    return Kind(_window_of_all(text), _state_of(text), bool(text.get("kv_lora_rank")))


def _window_of_all(text: Mapping[str, Any]) -> int | None:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return None
    layers = text.get("layer_types")
    if layers:
        return int(window) if set(layers) == {"sliding_attention"} else None
    return int(window) if text.get("model_type") in _WINDOWED else None


def _state_of(text: Mapping[str, Any]) -> str:
    for key in _LAYER_KEYS:
        for name in strings(text.get(key)):
            if _STATE_LAYER.search(name.lower()):
                return f"{key}: {name}"
    return next((key for key in _STATE_KEYS if text.get(key)), "")


def strings(value: object) -> Iterable[str]:
    """Return the texts of a list; nothing of what is no list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
