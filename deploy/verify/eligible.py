"""How many tokens of a prompt a correct stack must find in the shared store."""

from __future__ import annotations


def eligible_tokens(prompt_tokens: int, chunk_size: int, local_hits: int = 0) -> int:
    """Return the tokens that an engine must load, given what it holds itself.

    Only whole chunks are stored, so what is beyond the last whole one is recomputed. An engine must
    compute at least one token to have something to sample from, so of a prompt that ends with a
    chunk one token less counts. What the engine's own prefix cache holds is not asked for.
    """
    stored = prompt_tokens // chunk_size * chunk_size
    return max(0, min(stored, prompt_tokens - 1) - local_hits)
