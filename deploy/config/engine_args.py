"""Options of vLLM among a document's `engine.args`, as vLLM's own parser would read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deploy.errors import ConfigError

# vLLM's way to write large numbers: 8k is 8,000 and 8K is 8,192.
_DECIMAL = {"k": 10**3, "m": 10**6}
_BINARY = {"": 1, "K": 2**10, "M": 2**20}


def grouped(args: Sequence[str]) -> list[list[str]]:
    """Return each option, with dashes for underscores, and its values, in their order.

    What precedes the first option is a group of its own.
    """
    groups: list[list[str]] = []
    for argument in args:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            groups.append([name.replace("_", "-"), *([value] if equals else ())])
        elif not groups or re.match(r"-[a-z]", argument):
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def options(args: Sequence[str]) -> dict[str, str]:
    """Return each option, with dashes for underscores, and its value: "" for a flag alone."""
    return {name: (values or [""])[0] for name, *values in grouped(args) if name.startswith("--")}


def batched_tokens(args: Sequence[str]) -> int | None:
    """Return the most tokens that an engine computes in a step; None if not set.

    Raises:
        ConfigError: it is not a number above 0.
    """
    option = "--max-num-batched-tokens"
    text = options(args).get(option)
    if text is None:
        return None
    if number := re.fullmatch(r"(\d+(?:\.\d+)?)([km])", text):
        tokens = int(float(number[1]) * _DECIMAL[number[2]])
    elif number := re.fullmatch(r"(\d+)([KM]?)", text):
        tokens = int(number[1]) * _BINARY[number[2]]
    else:
        tokens = 0
    if not tokens:
        raise ConfigError(
            f"engine.args: {option} '{text}' is not a number of tokens",
            hint=f"set it to a number above 0, such as {option} 8192",
        )
    return tokens
