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
# Classes of vLLM that do not read the engine's maximum length, and rotate by the usual code.
_USUAL_CLASSES = frozenset({
    "Gemma2ForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
})  # fmt: skip
_USUAL_TYPES = frozenset({
    "gemma", "gemma2", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
})  # fmt: skip
# Rotations whose frequencies follow from config.json alone. Not `dynamic` and not `longrope`.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")


@dataclass(frozen=True)
class Kind:
    """Properties of a model's layers that decide whether its KV can be moved.

    Attributes:
        window: sliding window of every layer; None if a layer has full attention.
        state: the config entry by which layers keep a state instead of KV; "" if there is none.
        mla: K and V of all heads are computed from one row per token.
        fixed_positions: K and V of a position do not depend on the engine's maximum length.
    """

    window: int | None = None
    state: str = ""
    mla: bool = False
    fixed_positions: bool = False


PLAIN = Kind()


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind that a config.json describes; multimodal ones nest their language model."""
    text = config.get("text_config") or config
    return Kind(
        _window_of_all(text),
        _state_of(text),
        bool(text.get("kv_lora_rank")),
        _has_fixed_positions(config),
    )


def _window_of_all(text: Mapping[str, Any]) -> int | None:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return None
    layers = text.get("layer_types")
    if layers:
        return int(window) if set(layers) == {"sliding_attention"} else None
    return int(window) if text.get("model_type") in _WINDOWED else None


def _has_fixed_positions(config: Mapping[str, Any]) -> bool:
    """Tell whether positions are known not to depend on the maximum length; in doubt they may."""
    classes = set(strings(config.get("architectures")))
    other_code = ("auto_map", "text_config", "dual_chunk_attention_config")
    return (
        bool(classes)
        and classes <= _USUAL_CLASSES
        and config.get("model_type") in _USUAL_TYPES
        and not any(config.get(key) for key in other_code)
        and all(_is_fixed(config.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))
    )


def _is_fixed(rotation: object) -> bool:
    """Tell whether a rotation follows from its own entries; older files call its kind `type`."""
    if not isinstance(rotation, dict) or any(isinstance(one, dict) for one in rotation.values()):
        return False
    names = [rotation.get(key, "default") for key in ("rope_type", "type")]
    usual = all(isinstance(name, str) and name in _FIXED_ROTATIONS for name in names)
    return usual and "mrope_section" not in rotation and not rotation.get("use_fope")


def _state_of(text: Mapping[str, Any]) -> str:
    for key in _LAYER_KEYS:
        for name in strings(text.get(key)):
            if _STATE_LAYER.search(name.lower()):
                return f"{key}: {name}"
    return next((key for key in _STATE_KEYS if text.get(key)), "")


def strings(value: object) -> Iterable[str]:
    """Return the texts of a list; nothing of what is no list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
