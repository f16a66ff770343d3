"""The names of vLLM's arguments and variables in the repository are those of each pair's code."""

from __future__ import annotations

import pytest

from tests.gpu.pairs import MP_PAIR, PAIRS, installed, pinned
from tests.vllm_inputs import read, written


@pytest.mark.parametrize("pair", [*PAIRS, MP_PAIR])
def test_the_names_are_those_of_the_pairs_code(pair: str) -> None:
    version = pinned(pair)["vllm"]
    assert read(installed(pair) / "vllm") == written(version), (
        f"python -m tests.vllm_inputs {installed(pair) / 'vllm'} {version}"
    )
