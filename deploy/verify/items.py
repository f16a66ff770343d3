"""The items of a check beside the pairs, and what fails in one."""

from __future__ import annotations

from typing import NamedTuple

# As people and JUnit files name them.
PROMPTS = "prompts"
ROUTER = "router, no gap"
TURNS = "several turns"
DECODE_REUSE = "decode reuse"
SECOND_TIER = "from Redis alone"
BURST = "burst"
OWN_PROMPT = "your prompt"
CANARIES = "canaries"
EQUIVALENCE = "equivalence"
STORE = "redis"
ENGINES = "engines"


class Failure(NamedTuple):
    """A failure: the item of the check, and a sentence."""

    item: str
    sentence: str
