"""What of a prompt must come from the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.verify.hits import eligible_tokens, is_pinned, pinned_range


@pytest.mark.parametrize(
    ("prompt", "chunk", "eligible"),
    [
        (0, 256, 0),
        (1, 256, 0),
        (255, 256, 0),  # not one whole chunk
        (256, 256, 255),  # the last token is always computed
        (257, 256, 256),
        (511, 256, 256),
        (512, 256, 511),
        (1109, 256, 1024),
        (16, 16, 15),
        (1, 1, 0),
        (2, 1, 1),
    ],
)
def test_eligible_tokens_are_whole_chunks(prompt: int, chunk: int, eligible: int) -> None:
    assert eligible_tokens(prompt, chunk) == eligible


def test_eligible_tokens_are_fewer_than_the_prompt() -> None:
    for chunk in (1, 16, 256):
        for prompt in range(1, 600):
            eligible = eligible_tokens(prompt, chunk)
            assert 0 <= eligible < prompt, "one token is left to compute"
            assert prompt - eligible <= chunk, "no whole chunk is left out"


@pytest.mark.parametrize(
    ("version", "pinned"),
    [
        ("0.13.0", True), ("0.25.1", True), ("0.32.0", True), ("0.33.1rc2+cpu", True),
        ("0.12.9", False), ("0.34.0", False), ("1.0", False), ("", False), ("dev", False),
    ],
)  # fmt: skip
def test_releases_whose_counters_were_looked_at(version: str, pinned: bool) -> None:
    assert is_pinned(version) is pinned


def test_the_page_says_which() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "hit-rate.md"
    assert f"vLLM {pinned_range()}" in page.read_text(encoding="utf-8")
