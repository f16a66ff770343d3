"""A model with random weights whose KV is as large as a real one's: 64 KiB a token.

It computes little, so that a prompt of 172 MB of KV takes seconds on two cores. The tokenizer is
the tiny model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy.tiny_model import ensure_tiny_model

LAYERS, KV_HEADS, HEAD_SIZE = 16, 8, 128
BYTES_A_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2
NAME = "wide-random-llama"
POSITIONS = 8192


def make(folder: Path, *, positions: int = POSITIONS, kv_heads: int = KV_HEADS) -> Path:
    """Write the model, for prompts of so many tokens, and return its folder.

    Args:
        kv_heads: half of them where engines compute in float32, for as many bytes a token.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = ensure_tiny_model(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS, num_key_value_heads=kv_heads, head_dim=HEAD_SIZE,
        vocab_size=_vocabulary(tiny), max_position_embeddings=positions, tie_word_embeddings=False,
    )  # fmt: skip
    wide = folder / NAME
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(wide)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, wide / name)
    return wide


def _vocabulary(tiny: Path) -> int:
    import json

    return int(json.loads((tiny / "config.json").read_text(encoding="utf-8"))["vocab_size"])
