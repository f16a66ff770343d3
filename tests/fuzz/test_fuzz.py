"""A short run of every fuzzer, the same each time."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.fuzzers import FUZZERS

ROUNDS = 2000


@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_unexpected(name: str) -> None:
    seen = FUZZERS[name](random.Random(name), ROUNDS)
    assert len(seen) > 1, f"{seen}: a fuzzer must meet both sides"
