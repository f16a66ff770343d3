"""A byte-level tokenizer without merges: a token's id is its byte, so a prompt's length is sure."""

from __future__ import annotations

BEGIN, END, TURN_START, TURN_END = "<|begin|>", "<|end|>", "<|turn|>", "<|done|>"
SPECIAL_TOKENS = (BEGIN, END, TURN_START, TURN_END)
BEGIN_ID, END_ID, TURN_START_ID, TURN_END_ID = range(256, 260)
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    f"{{{{ '{BEGIN}' }}}}"
    "{% for message in messages %}"
    f"{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% endif %}}"
)


def tokenizer_json() -> dict[str, object]:
    """Return `tokenizer.json`: byte-level BPE with no merges, and four special tokens."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, text) for i, text in enumerate(SPECIAL_TOKENS, start=256)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": _vocabulary(),
            "merges": [],
        },
    }


def tokenizer_config_json(*, max_length: int) -> dict[str, object]:
    """Return `tokenizer_config.json`, the chat template in it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def _vocabulary() -> dict[str, int]:
    names = [_byte_name(byte) for byte in range(256)]
    return {name: i for i, name in enumerate((*names, *SPECIAL_TOKENS))}


def _byte_name(byte: int) -> str:
    """Return the character that ByteLevel writes for a byte.

    Bytes with a visible Latin-1 character stand for themselves; the others take, in order, the
    code points from 256 on.
    """
    if _is_visible(byte):
        return chr(byte)
    return chr(256 + sum(not _is_visible(other) for other in range(byte)))


def _is_visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE


def _special(token_id: int, text: str) -> dict[str, object]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
