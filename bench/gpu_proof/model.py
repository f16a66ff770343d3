"""A generated Llama with random bfloat16 weights: nothing is downloaded.

Its large shape is that of Qwen3-0.6B: 28 layers, 8 KV heads of 128, 112 KiB of KV a token. Plain
random weights would hide wrong KV, for their attention averages over all tokens and their logits
are nearly equal. So queries and keys are as large as makes a head look at few tokens, and logits
spread as those of trained models do; the step `edges` measures that answers tell prompts apart.
The tokenizer is the tiny model's, where a byte is a token.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.tiny_model import ensure_tiny_model

_SCORE_STD = 2.0  # of attention's scores: some ten tokens of 512 share a head's attention
_LOGIT_STD = 4.0


@dataclass(frozen=True)
class Shape:
    """The numbers of a config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = 40_960


LARGE = Shape(28, 1024, 3072, 16, 8, 128, 151_936)
SMALL = Shape(4, 256, 512, 4, 2, 64, 1024)


def make(folder: Path, shape: Shape) -> Path:
    """Return the folder of the model, made where it is not there yet."""
    model = folder / f"random-llama-{shape.layers}x{shape.hidden}"
    if (model / "config.json").is_file():
        return model
    import torch
    from safetensors.torch import save_file

    model.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    save_file(_weights(shape), str(model / "model.safetensors"), {"format": "pt"})
    tiny = ensure_tiny_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / name, model / name)
    # Last: if it exists, all files are complete.
    config = _config(shape, json.loads((tiny / "config.json").read_text(encoding="utf-8")))
    (model / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return model


def _config(shape: Shape, tiny: dict[str, Any]) -> dict[str, Any]:
    return {
        **tiny,
        "attention_bias": False,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
    }


def _weights(shape: Shape) -> dict[str, Any]:
    import torch

    def noise(rows: int, columns: int, std: float = 1.0) -> Any:
        """Return weights that make outputs of this standard deviation from inputs of 1."""
        return (torch.randn(rows, columns) * (std / columns**0.5)).to(torch.bfloat16)

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": noise(shape.vocabulary, shape.hidden, shape.hidden**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": noise(shape.vocabulary, shape.hidden, _LOGIT_STD),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": ones.clone(),
            f"{at}self_attn.q_proj.weight": noise(wide, shape.hidden, _SCORE_STD**0.5),
            f"{at}self_attn.k_proj.weight": noise(narrow, shape.hidden, _SCORE_STD**0.5),
            f"{at}self_attn.v_proj.weight": noise(narrow, shape.hidden),
            f"{at}self_attn.o_proj.weight": noise(shape.hidden, wide),
            f"{at}post_attention_layernorm.weight": ones.clone(),
            f"{at}mlp.gate_proj.weight": noise(shape.intermediate, shape.hidden),
            f"{at}mlp.up_proj.weight": noise(shape.intermediate, shape.hidden),
            f"{at}mlp.down_proj.weight": noise(shape.hidden, shape.intermediate),
        }
    return weights
