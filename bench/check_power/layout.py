"""Where each token's K and V lie in the bytes of a stored chunk, learned from an engine.

On CPUs a chunk is stored as vLLM's blocks lie in memory, and the inside of a block depends on the
machine's instructions. In the first layer a token's K and V follow from the token and its position
alone: where two prompts differ in one token, there it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# uint16 for each bfloat16, `[K and V, layers, tokens, heads, head_size]`.
Kv = Any
BASE, OTHERS = ord("a"), (ord("b"), ord("k"), ord("x"))


@dataclass(frozen=True)
class Shape:
    """The shape of a chunk's KV; the sizes are numbers of elements."""

    layers: int
    blocks: int
    heads: int
    block_size: int
    head_size: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the bytes, as 16-bit words: for each head, the words of its K, then of its V."""
        return self.layers, self.blocks, self.heads, 2, self.block_size * self.head_size


@dataclass(frozen=True)
class Layout:
    """A chunk's bytes, opened and closed.

    Attributes:
        places: `[K and V, block_size, head_size]`: the words of a head that belong to each token.
    """

    shape: Shape
    places: Any

    def opened(self, value: bytes) -> Kv:
        """Return a chunk's KV by tokens, for the caller to change."""
        shape = self.shape
        planes = np.frombuffer(value, np.uint16).reshape(shape.stored)
        parts = [planes[:, :, :, part][..., self.places[part]] for part in (0, 1)]
        # K and V, layers, blocks, heads, tokens of a block, head_size
        apart = np.stack(parts).transpose(0, 1, 2, 4, 3, 5)
        return apart.reshape(2, shape.layers, shape.tokens, shape.heads, shape.head_size).copy()

    def closed(self, kv: Kv) -> bytes:
        """Return the bytes of which `opened` makes this KV."""
        shape = self.shape
        apart = kv.reshape(
            2, shape.layers, shape.blocks, shape.block_size, shape.heads, shape.head_size
        ).transpose(0, 1, 2, 4, 3, 5)
        planes = np.empty(shape.stored, np.uint16)
        for part in (0, 1):
            planes[:, :, :, part][..., self.places[part]] = apart[part]
        return planes.tobytes()


def learn(chunk_of: Callable[[Sequence[int]], bytes], shape: Shape) -> Layout:
    """Return the layout of an engine's chunks.

    Args:
        chunk_of: stores a prompt of one chunk, and returns its bytes.

    Raises:
        ValueError: what differs is not as many words as a token has.
    """

    def first_layer(prompt: Sequence[int]) -> Any:
        return np.frombuffer(chunk_of(prompt), np.uint16).reshape(shape.stored)[0]

    base = first_layer([BASE] * shape.tokens)
    moved = np.zeros((2, shape.block_size, base.shape[-1]), bool)
    for letter in OTHERS:  # a few, for two letters can have some words in common
        for start in range(0, shape.block_size, shape.blocks):
            # In each block another token, so that one prompt tells of as many.
            at = [(start + block) % shape.block_size for block in range(shape.blocks)]
            prompt = [BASE] * shape.tokens
            for block, token in enumerate(at):
                prompt[block * shape.block_size + token] = letter
            differs = first_layer(prompt) != base
            for block, token in enumerate(at):
                moved[:, token] |= differs[block].any(axis=0)
    words_of_token, tokens_of_word = moved.sum(axis=2), moved.sum(axis=1)
    if (words_of_token != shape.head_size).any() or (tokens_of_word != 1).any():
        raise ValueError("a token's K and V are not where only that token's words differ")
    places = np.nonzero(moved)[2].reshape(2, shape.block_size, shape.head_size)
    return Layout(shape, places)
