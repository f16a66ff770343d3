"""Options among engine.args are read as vLLM's parser would."""

from __future__ import annotations

import pytest

from deploy.config.engine_args import batched_tokens, options


def test_options_are_read_from_arguments() -> None:
    args = ["--enforce-eager", "--kv_cache_dtype=fp8", "--max-num-seqs", "8", "--lora", "a=b", "c"]
    assert options(args) == {
        "--enforce-eager": "",
        "--kv-cache-dtype": "fp8",
        "--max-num-seqs": "8",
        "--lora": "a=b",
    }


def test_the_last_of_repeated_options_wins() -> None:
    assert options(["--a", "1", "--a=2"]) == {"--a": "2"}
    assert options(["--a=2", "--a", "1"]) == {"--a": "1"}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1m", 10**6), ("1M", 2**20)],
)
def test_batched_tokens_are_read_with_their_unit(text: str, tokens: int) -> None:
    assert batched_tokens(["--max-num-batched-tokens", text]) == tokens


def test_batched_tokens_are_unknown_without_the_option() -> None:
    assert batched_tokens(["--max-num-seqs", "8"]) is None
