"""A generated Llama with random bfloat16 weights: nothing is downloaded.

Plain random weights would hide wrong KV, for their attention averages over all tokens and their
logits are nearly equal. So queries and keys are as large as makes a head look at few tokens, and
logits spread as those of trained models do; the step `edges` measures that answers tell prompts
apart. The tokenizer is the tiny model's, where a byte is a token.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
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


# Those of Qwen3-0.6B, with 112 KiB of KV a token, and of Llama 3.1 8B, with 128 KiB.
SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151_936),
    "llama-8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256),
}
SMALL = Shape(4, 256, 512, 4, 2, 64, 1024)


def folder_of(folder: Path, shape: Shape) -> Path:
    """Return where the model of a shape is, or is to be."""
    return folder / f"random-llama-{shape.layers}x{shape.hidden}"


def make(folder: Path, shape: Shape) -> Path:
    """Return the folder of the model, made where it is not there yet."""
    model = folder_of(folder, shape)
    if (model / "config.json").is_file():
        return model
    from safetensors.torch import save_file

    model.mkdir(parents=True, exist_ok=True)
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

    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Name → rows, columns, and the standard deviation of outputs from inputs of 1.
    noise = {
        "model.embed_tokens": (shape.vocabulary, shape.hidden, shape.hidden**0.5),
        "lm_head": (shape.vocabulary, shape.hidden, _LOGIT_STD),
    }
    ones = ["model.norm"]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        ones += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
        noise |= {
            f"{at}self_attn.q_proj": (wide, shape.hidden, _SCORE_STD**0.5),
            f"{at}self_attn.k_proj": (narrow, shape.hidden, _SCORE_STD**0.5),
            f"{at}self_attn.v_proj": (narrow, shape.hidden, 1.0),
            f"{at}self_attn.o_proj": (shape.hidden, wide, 1.0),
            f"{at}mlp.gate_proj": (shape.intermediate, shape.hidden, 1.0),
            f"{at}mlp.up_proj": (shape.intermediate, shape.hidden, 1.0),
            f"{at}mlp.down_proj": (shape.hidden, shape.intermediate, 1.0),
        }

    def made(seed: int, rows: int, columns: int, std: float) -> Any:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
        return weight.mul_(std / columns**0.5)

    # Torch makes random numbers in one thread, a hundred million a second.
    with ThreadPoolExecutor() as pool:
        weights = list(pool.map(made, range(len(noise)), *zip(*noise.values(), strict=True)))
    named = {
        **dict(zip(noise, weights, strict=True)),
        **{name: torch.ones(shape.hidden, dtype=torch.bfloat16) for name in ones},
    }
    return {f"{name}.weight": weight for name, weight in named.items()}
