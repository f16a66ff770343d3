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

# A word holds the bits of a number of KV.
WORDS = {"bfloat16": np.uint16, "float32": np.uint32}
# Words, `[K and V, layers, tokens, heads, head_size]`.
Kv = Any
BASE, OTHERS = ord("a"), (ord("b"), ord("k"), ord("x"))


@dataclass(frozen=True)
class Shape:
    """The shape of a chunk's KV; the sizes are numbers of elements.

    Attributes:
        heads_first: each head's K is followed by its V; else the K of all heads by their V.
        word: the type of a word.
    """

    layers: int
    blocks: int
    heads: int
    block_size: int
    head_size: int
    heads_first: bool = True
    word: type = np.uint16

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def words(self) -> int:
        """How many words a block's K have, and its V as many."""
        return self.heads * self.block_size * self.head_size

    def opened(self, value: bytes) -> Any:
        """Return a chunk as words, `[layers, blocks, K and V, words]`."""
        words = np.frombuffer(value, self.word)
        by_part = self.layers, self.blocks, 2, self.words
        if not self.heads_first:
            return words.reshape(by_part)
        apart = words.reshape(self.layers, self.blocks, self.heads, 2, -1)
        return apart.swapaxes(2, 3).reshape(by_part)

    def closed(self, words: Any) -> bytes:
        """Return the bytes of which `opened` makes these words."""
        if not self.heads_first:
            return words.tobytes()
        apart = words.reshape(self.layers, self.blocks, 2, self.heads, -1)
        return apart.swapaxes(2, 3).tobytes()


@dataclass(frozen=True)
class Layout:
    """A chunk's bytes, opened and closed.

    Attributes:
        places: `[K and V, block_size, heads, head_size]`: the words of a block's K, and of its V,
            that belong to each token.
    """

    shape: Shape
    places: Any

    def opened(self, value: bytes) -> Kv:
        """Return a chunk's KV by tokens, for the caller to change."""
        shape = self.shape
        words = shape.opened(value)
        # K and V, layers, blocks, tokens of a block, heads, head_size
        apart = np.stack([words[:, :, part][..., self.places[part]] for part in (0, 1)])
        return apart.reshape(2, shape.layers, shape.tokens, shape.heads, shape.head_size)

    def closed(self, kv: Kv) -> bytes:
        """Return the bytes of which `opened` makes this KV."""
        shape = self.shape
        apart = kv.reshape(
            2, shape.layers, shape.blocks, shape.block_size, shape.heads, shape.head_size
        )
        words = np.empty((shape.layers, shape.blocks, 2, shape.words), shape.word)
        for part in (0, 1):
            words[:, :, part][..., self.places[part]] = apart[part]
        return shape.closed(words)


def learn(chunk_of: Callable[[Sequence[int]], bytes], shape: Shape) -> Layout:
    """Return the layout of an engine's chunks.

    Args:
        chunk_of: stores a prompt of one chunk, and returns its bytes.

    Raises:
        ValueError: what differs is not as many words as a token has.
    """

    def first_layer(prompt: Sequence[int]) -> Any:
        return shape.opened(chunk_of(prompt))[0]

    base = first_layer([BASE] * shape.tokens)
    moved = np.zeros((2, shape.block_size, shape.words), bool)
    for letter in OTHERS:  # a few, for two letters can have some words in common
        for start in range(0, shape.block_size, shape.blocks):
            # In each block another token, so that one prompt tells of as many.
            at = [(start + block) % shape.block_size for block in range(shape.blocks)]
            prompt = [BASE] * shape.tokens
            for block, token in enumerate(at):
                prompt[block * shape.block_size + token] = letter
            differs = first_layer(prompt) != base
            for block, token in enumerate(at):
                moved[:, token] |= differs[block]
    words_of_token, tokens_of_word = moved.sum(axis=2), moved.sum(axis=1)
    if (words_of_token != shape.heads * shape.head_size).any() or (tokens_of_word != 1).any():
        raise ValueError("a token's K and V are not where only that token's words differ")
    # Heads are one behind the other, whatever is around and between them.
    places = np.nonzero(moved)[2].reshape(2, shape.block_size, shape.heads, shape.head_size)
    return Layout(shape, places)
