"""Which pairs of engines the patterns of --pairs name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from deploy.errors import UsageError

T = TypeVar("T")


def named_pairs(pairs: Mapping[str, T], patterns: Sequence[str], *, hint: str) -> list[T]:
    """Return those of the pairs that a pattern names, in their own order.

    Args:
        pairs: what is wanted of each pair, by its name, such as 'producer-0:consumer-0'.
        patterns: such as 'producer-0:*'.
        hint: the command that an error suggests.

    Raises:
        UsageError: a pattern names none of them.
    """
    for pattern in patterns:
        if not any(fnmatchcase(pair, pattern) for pair in pairs):
            raise UsageError(
                f"--pairs {pattern}: no such pair; pairs: {', '.join(pairs) or 'none yet'}",
                hint=hint,
            )
    return [
        wanted
        for pair, wanted in pairs.items()
        if any(fnmatchcase(pair, pattern) for pattern in patterns)
    ]
