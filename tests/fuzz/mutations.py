"""Damage to bytes and text."""

from __future__ import annotations

import random

_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64, 99_000_000_000)
_CUTS = 3


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the data with a few things wrong, such as a flipped bit or a piece twice."""
    found = bytearray(data)
    for _ in range(rng.randint(1, _CUTS)):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.randint(1, 16))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at:end]
        elif kind == 2:
            found[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 3:
            found[at:at] = found[at:end]
        elif kind == 4:
            found[at:end] = str(rng.choice(_NUMBERS)).encode()
        else:
            del found[at:]
    return bytes(found)
