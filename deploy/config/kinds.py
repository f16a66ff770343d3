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
    "attn_layer_period", "conv_L_cache", "hybrid_override_pattern", "layer_group_size",
    "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "ssm_cfg", "ssm_state_size",
    "state_size",
)  # fmt: skip
# Of a weight, by a part of the name of its quantization.
_BITS = {"fp4": 4, "fp8": 8, "w4a16": 4, "awq": 4, "bitsandbytes": 8}
_GROUP_KEYS = ("compress_ratios",)  # DeepSeek V4: windows beside KV of several tokens in one
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
# Names of architectures that answer with no text: vectors, scores, classes, masked words. Of those
# that end in Model, some generate.
_NOT_TEXT = re.compile(
    r"For(Sequence|Token|Image|Audio|Video)Classification$|For(MaskedLM|Embedding|PreTraining"
    r"|QuestionAnswering|MultipleChoice|Reward\w*|ProcessReward\w*|CTC|Retrieval|ImageTextRetrieval)$"
    r"|(?<!Chat)(?<!ChatGLM)(?<!LMHead)(?<!DashengLM)(?<!MossAudio)(?<!Omni)(?<!Ultravox)"
    r"(?<!NVLM_D_)Model$"
)
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")


@dataclass(frozen=True)
class Kind:
    """Properties of a model's layers that decide whether its KV can be moved.

    Attributes:
        window: sliding window of every layer; None if a layer has full attention.
        state: the config entry by which layers keep a state instead of KV; "" if there is none.
        mla: K and V of all heads are computed from one row per token.
        fixed_positions: K and V of a position do not depend on the engine's maximum length.
        not_text: the architecture, if it is one that generates no text or reads prompts with an
            encoder; "" if it may generate.
        groups: the config entry by which layers keep KV of different kinds, which vLLM never puts
            into one group; "" if there is none.
        weight_bits: of a quantized weight; 0 if weights have the data type, or it is not known.
    """

    window: int | None = None
    state: str = ""
    mla: bool = False
    fixed_positions: bool = False
    not_text: str = ""
    groups: str = ""
    weight_bits: int = 0


PLAIN = Kind()


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind that a config.json describes.

    Raises:
        TypeError, ValueError, LookupError: a value is of another type.
    """
    text = text_of(config)
    return Kind(
        _window_of_all(text),
        _state_of(text),
        bool(text.get("kv_lora_rank")),
        _has_fixed_positions(config),
        _not_text(config),
        next((key for key in _GROUP_KEYS if text.get(key)), ""),
        _weight_bits(config.get("quantization_config") or text.get("quantization_config")),
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which multimodal models nest."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = config.get(key)
        if isinstance(nested, dict) and nested:
            return text_of(nested)
    return config


def _weight_bits(quantization: object) -> int:
    """Return the bits of a weight by a config's `quantization_config`; 0 if it does not say."""
    if not isinstance(quantization, dict):
        return 0
    groups = quantization.get("config_groups")
    weights = [one.get("weights") for one in groups.values()] if isinstance(groups, dict) else []
    named = [one.get("num_bits") for one in weights if isinstance(one, dict)]
    for bits in (quantization.get("bits"), *named):
        if isinstance(bits, int) and not isinstance(bits, bool):
            return bits
    if quantization.get("load_in_4bit"):
        return 4
    method = f"{quantization.get('quant_method')} {quantization.get('quant_algo')}".lower()
    return next((bits for name, bits in _BITS.items() if name in method), 0)


def _not_text(config: Mapping[str, Any]) -> str:
    names = list(strings(config.get("architectures")))
    encoded = bool(config.get("is_encoder_decoder"))
    silent = names and (encoded or all(map(_NOT_TEXT.search, names)))
    return " or ".join(names) if silent else ""


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
    kinds = text.get("attn_type_list")  # of MiniMax-01: 1 is full attention
    if isinstance(kinds, list) and 0 in kinds:
        return "attn_type_list: 0"
    return next((key for key in _STATE_KEYS if text.get(key)), "")


def strings(value: object) -> Iterable[str]:
    """Return the texts of a list; nothing of what is no list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
