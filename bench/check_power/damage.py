"""What can be wrong with stored KV: each kind changes one thing in the chunks of one prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.check_power.layout import Kv, Layout

_K, _V, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)


@dataclass(frozen=True)
class Stored:
    """What a vandal finds: a prompt's chunks as bytes, in any order, and another prompt's."""

    chunks: Sequence[bytes]
    foreign: bytes
    layout: Layout


# What was stored → the chunks to put in their places, by their numbers.
Damage = Callable[[Stored, random.Random], Mapping[int, bytes]]
# A chunk's KV, which may be edited in place → what becomes of it.
Edit = Callable[[Kv, random.Random], Kv]


@dataclass(frozen=True)
class Kind:
    """One way to be wrong.

    Attributes:
        tells: what it does, for people.
        expected: whether a check can be asked to notice it.
    """

    tells: str
    damage: Damage
    expected: bool = True


def nothing(_stored: Stored, _rng: random.Random) -> Mapping[int, bytes]:
    return {}


def foreign_chunk(stored: Stored, rng: random.Random) -> Mapping[int, bytes]:
    return {_a_chunk(stored, rng): stored.foreign}


def exchanged_chunks(stored: Stored, rng: random.Random) -> Mapping[int, bytes]:
    one, two = rng.sample(range(len(stored.chunks)), 2)
    return {one: stored.chunks[two], two: stored.chunks[one]}


def in_one_chunk(edit: Edit) -> Damage:
    """Return the damage that edits the KV of one chunk."""

    def damage(stored: Stored, rng: random.Random) -> Mapping[int, bytes]:
        number = _a_chunk(stored, rng)
        kv = stored.layout.opened(stored.chunks[number])
        return {number: stored.layout.closed(edit(kv, rng))}

    return damage


def noise(kv: Kv, rng: random.Random) -> Kv:
    """Return normal noise of the same size, by layer and by K and V."""
    size = as_floats(kv).std(axis=(2, 3, 4), keepdims=True)
    return as_words(_numpy(rng).standard_normal(kv.shape, np.float32) * size, kv.dtype)


def flip(part: slice) -> Edit:
    def edit(kv: Kv, rng: random.Random) -> Kv:
        place = tuple(rng.randrange(size) for size in kv.shape[1:])
        kv[part][(0, *place)] ^= kv.dtype.type(1 << (8 * kv.itemsize - 2))
        return kv

    return edit


def zero_layer(kv: Kv, rng: random.Random) -> Kv:
    kv[:, rng.randrange(kv.shape[1])] = 0
    return kv


def shuffle_rows(part: slice) -> Edit:
    def edit(kv: Kv, rng: random.Random) -> Kv:
        kv[part] = kv[part][:, :, _numpy(rng).permutation(kv.shape[2])]
        return kv

    return edit


def exchange_rows(part: slice) -> Edit:
    def edit(kv: Kv, rng: random.Random) -> Kv:
        pair = rng.sample(range(kv.shape[2]), 2)
        kv[part][:, :, pair] = kv[part][:, :, pair[::-1]]
        return kv

    return edit


def exchange_planes(kv: Kv, _rng: random.Random) -> Kv:
    return kv[::-1]


def exchange_heads(kv: Kv, _rng: random.Random) -> Kv:
    return kv[:, :, :, ::-1]


def transpose_heads(kv: Kv, _rng: random.Random) -> Kv:
    """Read `[heads, tokens]` where `[tokens, heads]` is."""
    return kv.swapaxes(2, 3).reshape(kv.shape)


def read_as_float16(kv: Kv, _rng: random.Random) -> Kv:
    """Two float16 fit where one float32 was, so all are written twice."""
    return np.resize(as_floats(kv).astype(np.float16).view(kv.dtype), kv.shape)


def token_major(stored: Stored, rng: random.Random) -> Mapping[int, bytes]:
    """Put the bytes in the order that LMCache gives to KV of GPUs."""
    number = _a_chunk(stored, rng)
    return {number: stored.layout.opened(stored.chunks[number]).tobytes()}


NOTHING = "nothing"
KINDS: Mapping[str, Kind] = {
    NOTHING: Kind("nothing is damaged: the check must pass", nothing, expected=False),
    "noise": Kind("one chunk is noise of the same size", in_one_chunk(noise)),
    "k-bit": Kind("the top exponent bit of one K value is flipped", in_one_chunk(flip(_K))),
    "v-bit": Kind("the top exponent bit of one V value is flipped", in_one_chunk(flip(_V))),
    "zero-layer": Kind("one layer of a chunk is zero", in_one_chunk(zero_layer)),
    "rows-kv": Kind("a chunk's tokens are shuffled", in_one_chunk(shuffle_rows(_BOTH))),
    "rows-k": Kind("a chunk's tokens are shuffled in K only", in_one_chunk(shuffle_rows(_K))),
    "rows-v": Kind("a chunk's tokens are shuffled in V only", in_one_chunk(shuffle_rows(_V))),
    "two-rows-k": Kind("two tokens of a chunk are exchanged in K", in_one_chunk(exchange_rows(_K))),
    "two-rows-v": Kind("two tokens of a chunk are exchanged in V", in_one_chunk(exchange_rows(_V))),
    "two-rows-kv": Kind(
        "two tokens of a chunk are exchanged", in_one_chunk(exchange_rows(_BOTH)), expected=False
    ),
    "chunks": Kind("two chunks are exchanged", exchanged_chunks),
    "stale-chunk": Kind("another prompt's chunk is under this key", foreign_chunk),
    "planes": Kind("K and V are exchanged", in_one_chunk(exchange_planes)),
    "heads": Kind("the KV heads are exchanged", in_one_chunk(exchange_heads)),
    "heads-tokens": Kind("heads and tokens are transposed", in_one_chunk(transpose_heads)),
    "token-major": Kind("the bytes lie as LMCache orders KV of GPUs", token_major),
    "float16": Kind("the numbers are float16", in_one_chunk(read_as_float16)),
}


def as_floats(kv: Kv) -> Kv:
    """Return the numbers as float32."""
    wide = kv if kv.dtype == np.uint32 else kv.astype(np.uint32) << 16
    return wide.view(np.float32)


def as_words(floats: Kv, word: Any) -> Kv:
    """Return float32 numbers as words, those of bfloat16 rounded to nearest."""
    bits = np.asarray(floats, np.float32).view(np.uint32)
    return bits if word == np.uint32 else ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(word)


def _a_chunk(stored: Stored, rng: random.Random) -> int:
    return rng.randrange(len(stored.chunks))


def _numpy(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(63))
