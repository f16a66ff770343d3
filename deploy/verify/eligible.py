"""How many tokens of a prompt a correct stack must find in the shared store."""

from __future__ import annotations

import re

# The releases of vLLM whose scheduler was read for what it counts, first and last. Hits mean the
# same in all of them; since some release after 0.13, queries leave out what the engine held itself.
# The check's own prompts are new to every engine, so that both meanings of queries are one.
PINNED = ((0, 13), (0, 33))


def eligible_tokens(prompt_tokens: int, chunk_size: int) -> int:
    """Return the tokens that an engine must load of a prompt that is new to it.

    Only whole chunks are stored, so what is beyond the last whole one is recomputed. An engine must
    compute at least one token to have something to sample from, so of a prompt that ends with a
    chunk one token less counts.
    """
    stored = prompt_tokens // chunk_size * chunk_size
    return max(0, min(stored, prompt_tokens - 1))


def is_pinned(version: str) -> bool:
    """Tell whether the formula was compared with what this release of vLLM counts."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    return PINNED[0] <= (int(numbers[1]), int(numbers[2])) <= PINNED[1]


def pinned_range() -> str:
    """Return the releases of vLLM that the formula is pinned to."""
    return " to ".join(f"{major}.{minor}" for major, minor in PINNED)
