"""A model with random weights in the shape of Qwen2.5-0.5B, whose bfloat16 answers are as noisy.

Hidden size, heads, vocabulary and logits (the likeliest around 20) are those of the real one; all
the layers, or the first few where time is short. The tokenizer is the tiny model's, filled up with
names for the other ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.tiny_model.tokenizer import tokenizer_config_json, tokenizer_json

LAYERS, VOCABULARY, POSITIONS = 24, 151_936, 8192
# Random keys and queries this large attend to few tokens, so that answers depend on the KV.
_ATTENTION_STD = 0.05
# Makes the logits' standard deviation 4.5, and the largest of 151,936 about 20.
_FINAL_NORM = 7.5


def make(folder: Path, *, layers: int = LAYERS) -> Path:
    """Write the model into the folder and return it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS, rope_theta=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(_FINAL_NORM)
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.normal_(std=_ATTENTION_STD)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    _write(folder / "tokenizer.json", _full_tokenizer())
    _write(folder / "tokenizer_config.json", tokenizer_config_json(max_length=POSITIONS))
    return folder


def _full_tokenizer() -> dict[str, Any]:
    tokenizer: dict[str, Any] = tokenizer_json()
    known = tokenizer["model"]["vocab"]
    known |= {f"<{token}>": token for token in range(len(known), VOCABULARY)}
    return tokenizer


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
