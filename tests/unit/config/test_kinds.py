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
