"""Weights from a hash stream, rounded to bfloat16 by integers alone.

No library's random generator or float rounding takes part, so every machine makes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TypeAlias

_SIGNIFICAND_BITS = 8  # of bfloat16, the implicit one included
_EXPONENT_BIAS = 127
_SMALLEST_NORMAL = -126
_LARGEST_NORMAL = 127
_SIGN_CHANGE = bytes(byte ^ 0x80 for byte in range(256))  # of a value's high byte


@dataclass(frozen=True)
class EvenValues:
    """`count` values spread evenly over the open interval (-amplitude, amplitude)."""

    count: int
    amplitude: float


@dataclass(frozen=True)
class Constant:
    """`count` times the same value."""

    count: int
    value: float


@dataclass(frozen=True)
class Opposite:
    """The `count` values before it once more, with their signs changed."""

    count: int


Run: TypeAlias = EvenValues | Constant | Opposite


@dataclass(frozen=True)
class Tensor:
    """A named bfloat16 tensor, as runs of values in row-major order."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]


def bfloat16_bits(numerator: int, denominator: int) -> int:
    """Return the 16 bits of numerator / denominator, rounded to nearest, ties to even.

    `denominator` is a power of two, as `float.as_integer_ratio` gives.

    Raises:
        ValueError: the value is neither zero nor within the normal range.
    """
    sign = 0x8000 if numerator < 0 else 0
    significand = abs(numerator)
    if significand == 0:
        return 0
    drop = significand.bit_length() - _SIGNIFICAND_BITS
    exponent = drop - (denominator.bit_length() - 1)
    significand = _shift_to_even(significand, drop)
    if significand == 1 << _SIGNIFICAND_BITS:  # rounding carried into a further bit
        significand >>= 1
        exponent += 1
    exponent += _SIGNIFICAND_BITS - 1
    if not _SMALLEST_NORMAL <= exponent <= _LARGEST_NORMAL:
        raise ValueError(f"{numerator}/{denominator} is outside the normal range of bfloat16")
    return sign | (exponent + _EXPONENT_BIAS) << 7 | significand & 0x7F


def _shift_to_even(value: int, drop: int) -> int:
    if drop <= 0:
        return value << -drop
    kept, half = value >> drop, 1 << (drop - 1)
    rest = value & ((1 << drop) - 1)
    return kept + (rest > half or (rest == half and kept & 1))


def tensor_bytes(tensor: Tensor, *, seed: str) -> bytes:
    """Return the tensor's little-endian bfloat16 bytes; they depend on seed, name and runs only.

    Raises:
        ValueError: the runs do not add up to the shape.
    """
    size = sum(run.count for run in tensor.runs)
    if size != math.prod(tensor.shape):
        raise ValueError(f"{tensor.name}: runs of {size} values for the shape {tensor.shape}")
    stream = hashlib.shake_256(f"{seed}/{tensor.name}".encode()).digest(size)
    low, high, start = bytearray(), bytearray(), 0
    for run in tensor.runs:
        if isinstance(run, Opposite):
            low += low[-run.count :]
            high += high[-run.count :].translate(_SIGN_CHANGE)
        else:
            low_of, high_of = _tables(run)
            piece = stream[start : start + run.count]
            low += piece.translate(low_of)
            high += piece.translate(high_of)
        start += run.count
    out = bytearray(2 * size)
    out[0::2], out[1::2] = low, high
    return bytes(out)


@cache
def _tables(run: EvenValues | Constant) -> tuple[bytes, bytes]:
    """Return a table from a stream's byte to the two bytes of a bfloat16.

    Byte b stands for the odd number 2b - 255, in 256ths of the amplitude.
    """
    if isinstance(run, Constant):
        ratio = run.value.as_integer_ratio()
        codes = [bfloat16_bits(*ratio)] * 256
    else:
        numerator, denominator = run.amplitude.as_integer_ratio()
        codes = [bfloat16_bits((2 * b - 255) * numerator, 256 * denominator) for b in range(256)]
    return bytes(code & 0xFF for code in codes), bytes(code >> 8 for code in codes)


def safetensors_bytes(tensors: tuple[Tensor, ...], *, seed: str) -> bytes:
    """Return a safetensors file: header length, JSON header, then the tensors in the given order.

    Written here and not by the library, whose header spacing and order may change by version.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start is aligned to 8 bytes
    bodies = (tensor_bytes(tensor, seed=seed) for tensor in tensors)
    return b"".join(chain((struct.pack("<Q", len(text)), text), bodies))
