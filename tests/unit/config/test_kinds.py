"""Which kind of model a config.json describes."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.kinds import Kind, kind_of

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "llama"}, Kind()),
        ({"model_type": "mistral", "sliding_window": 4096}, Kind(window=4096)),
        ({"model_type": "mistral", "sliding_window": None}, Kind()),
        ({"text_config": {"model_type": "mistral", "sliding_window": 512}}, Kind(window=512)),
        ({"model_type": "x", "sliding_window": 128, "layer_types": [SLIDING] * 2}, Kind(128)),
        ({"model_type": "gemma3", "sliding_window": 128, "layer_types": [SLIDING, FULL]}, Kind()),
        ({"model_type": "gemma2", "sliding_window": 4096}, Kind()),
        (
            {"model_type": "phi3", "sliding_window": 2047, "use_sliding_window": False},
            Kind(),
        ),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, Kind(mla=True)),
        ({"layer_types": ["linear_attention", FULL]}, Kind(state="layer_types: linear_attention")),
        ({"layers_block_type": ["mamba", "hybrid"]}, Kind(state="layers_block_type: mamba")),
        ({"layer_types": ["conv", FULL]}, Kind(state="layer_types: conv")),
        ({"model_type": "jamba", "attn_layer_period": 8}, Kind(state="attn_layer_period")),
        ({"hybrid_override_pattern": "M-M*-"}, Kind(state="hybrid_override_pattern")),
        ({"text_config": {"linear_num_key_heads": 16}}, Kind(state="linear_num_key_heads")),
    ],
)
def test_the_kind_of_a_model_is_read_from_its_config(config: dict[str, Any], kind: Kind) -> None:
    assert kind_of(config) == kind


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]},
         "XLMRobertaForSequenceClassification"),
        ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
         "WhisperForConditionalGeneration"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "Qwen2ForRewardModel"),
        ({"architectures": ["LlamaForCausalLM"]}, ""),
        ({"architectures": ["GPT2LMHeadModel"]}, ""),
        ({"architectures": ["ChatGLMModel"]}, ""),
        ({"architectures": ["InternVLChatModel"]}, ""),
        ({"architectures": ["Qwen2_5OmniModel"]}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_generates_no_text_is_known_by_its_architecture(
    config: dict[str, Any], named: str
) -> None:
    assert kind_of(config).not_text == named


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "new"}, 0),
        (None, 0),
    ],
)  # fmt: skip
def test_bits_of_quantized_weights_are_read(quantization: dict[str, Any] | None, bits: int) -> None:
    assert kind_of({"quantization_config": quantization}).weight_bits == bits
    assert kind_of({"text_config": {"quantization_config": quantization}}).weight_bits == bits


@pytest.mark.parametrize(
    "config",
    [
        {"llm_config": {"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}},
        {"thinker_config": {"text_config": {"layer_types": ["linear_attention"]}}},
        {"language_config": {"mamba_d_state": 16}},
        {"layer_group_size": 5},
        {"attn_type_list": [0, 0, 1]},
    ],
)
def test_states_of_nested_language_models_are_seen(config: dict[str, Any]) -> None:
    assert kind_of(config).state


def test_latent_attention_of_a_nested_language_model_is_seen() -> None:
    assert kind_of({"language_config": {"kv_lora_rank": 512}}).mla
