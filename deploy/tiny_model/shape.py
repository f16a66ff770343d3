"""The tiny model's shape: all that a plan needs to know of it."""

from __future__ import annotations

from deploy.tiny_model.tokenizer import BEGIN_ID, END_ID, TURN_END_ID, VOCABULARY_SIZE

VERSION = 2
SEED = f"pdkit-tiny-llama-{VERSION}"

HIDDEN = 256
HEAD_DIM = 64
LAYERS = 4
QUERY_HEADS = 4
KV_HEADS = 2  # so that a tensor-parallel size of 3 is refused by rule
INTERMEDIATE = 512
MAX_POSITIONS = 32768
ROPE_THETA = 10000.0


def config_json() -> dict[str, object]:
    """Return `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": [END_ID, TURN_END_ID],
        "pad_token_id": END_ID,
    }


def generation_config_json() -> dict[str, object]:
    """Return `generation_config.json`: greedy unless the request says otherwise."""
    return {
        "do_sample": False,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": [END_ID, TURN_END_ID],
        "pad_token_id": END_ID,
    }
