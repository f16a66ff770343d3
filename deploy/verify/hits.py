"""What a check counted: hits in the store, by pair and by phase, and how many there must be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from operator import add
from typing import Annotated

from pydantic import PlainSerializer, computed_field, model_serializer
from typing_extensions import NotRequired, TypedDict

from deploy.document import Rounded

# The releases of vLLM whose scheduler was read for what it counts, first and last. Hits mean the
# same in all of them; since some release after 0.13, queries leave out what the engine held itself.
# The check's own prompts are new to every engine, so that both meanings of queries are one.
PINNED = ((0, 13), (0, 33))


@dataclass(frozen=True)
class Hits:
    """Tokens that were to be loaded from the store, and those that were.

    Attributes:
        queries: tokens that the store was asked for: all that the consumer did not hold itself.
        hits: tokens that were loaded from it.
        eligible: what a healthy stack must load.
    """

    queries: int = 0
    hits: int = 0
    eligible: int = 0

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.queries + other.queries, self.hits + other.hits, self.eligible + other.eligible
        )

    @computed_field
    @property
    def rate(self) -> Rounded:
        """vLLM's external prefix cache hit rate, hits / queries."""
        return self.hits / self.queries if self.queries else 0.0

    @computed_field
    @property
    def eligible_rate(self) -> Rounded:
        """Hits / eligible, 0 to 1."""
        return self.hits / self.eligible if self.eligible else 0.0


# As a document has them beside `eligible` and `eligible_rate`.
_Loaded = Annotated[Hits, PlainSerializer(lambda hits: hits.hits, return_type=int)]


@dataclass(frozen=True)
class Tiers:
    """Where the KV of prompts came from, in tokens.

    Attributes:
        asked: tokens of prompts; those of one that a producer and a consumer get count twice.
        local: from the engines' own prefix caches.
        server: from the memory of LMCache's server; of several prompts together, at least.
        redis: from Redis; of several prompts together, at most: the server looks a whole prompt
            up, also what of it an engine holds itself.
        computed: all others.
    """

    asked: int = 0
    local: int = 0
    server: int = 0
    redis: int = 0
    computed: int = 0

    def __add__(self, other: Tiers) -> Tiers:
        return Tiers(*map(add, astuple(self), astuple(other)))


def added(tiers: Iterable[Tiers | None]) -> Tiers | None:
    """Return those of several prompts together; None without any, or if one is unknown."""
    found = list(tiers)
    known = [one for one in found if one is not None]
    return sum(known, Tiers()) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class PairResult:
    """One producer with one consumer, in tokens.

    Attributes:
        tiers: where the consumer got the KV of its prompts from; None if others' requests changed
            the counters, a prompt had no answer, or LMCache's server does not tell.
    """

    producer: str
    consumer: str
    hits: _Loaded
    tiers: Tiers | None = None

    @computed_field
    @property
    def eligible(self) -> int:
        """Tokens that a healthy stack must load."""
        return self.hits.eligible

    @computed_field
    @property
    def eligible_rate(self) -> Rounded:
        """Hits / eligible, 0 to 1."""
        return self.hits.eligible_rate

    @property
    def name(self) -> str:
        """The pair, as messages name it."""
        return f"{self.producer} → {self.consumer}"

    @property
    def complete(self) -> bool:
        """Exactly what is eligible was loaded; more would be as wrong as less."""
        return self.hits.eligible > 0 and self.hits.hits == self.hits.eligible


class StoreRace(TypedDict):
    """Prompts through the router, whose decode follows its prefill at once.

    Attributes:
        gap_s: seconds between prefill and decode.
        blurred: other clients' requests changed the counters.
    """

    gap_s: float
    eligible: int
    hits: int
    eligible_rate: float
    blurred: bool


class PhaseResult(TypedDict):
    """Prompts of one kind; only `skipped` if there were none.

    Attributes:
        skipped: why there were none.
        requests: sent.
        failed: not answered.
        blurred: other clients' requests changed the counters.
    """

    skipped: NotRequired[str]
    requests: NotRequired[int]
    failed: NotRequired[int]
    eligible: NotRequired[int]
    hits: NotRequired[int]
    eligible_rate: NotRequired[float]
    blurred: NotRequired[bool]


@dataclass(frozen=True)
class Phase:
    """Prompts of one kind beside the pairs.

    Attributes:
        failed: of the requests, those that were not answered.
        skipped: why there were none; "" if there were.
        blurred: others' requests moved the counters that tell the hits.
    """

    hits: Hits = Hits()
    requests: int = 0
    failed: int = 0
    skipped: str = ""
    blurred: bool = False

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.hits + other.hits,
            self.requests + other.requests,
            self.failed + other.failed,
            blurred=self.blurred or other.blurred,
        )

    @model_serializer
    def result(self) -> PhaseResult:
        """Return the phase as a document; only the reason if it was skipped."""
        if self.skipped:
            return {"skipped": self.skipped}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "eligible": self.hits.eligible,
            "hits": self.hits.hits,
            "eligible_rate": round(self.hits.eligible_rate, 6),
            "blurred": self.blurred,
        }

    def race(self) -> StoreRace:
        """Return the phase as the race of decode and store."""
        return {
            "gap_s": 0,
            "eligible": self.hits.eligible,
            "hits": self.hits.hits,
            "eligible_rate": round(self.hits.eligible_rate, 6),
            "blurred": self.blurred,
        }


@dataclass(frozen=True)
class Counted:
    """What vLLM itself counted on the consumers meanwhile, in tokens.

    Attributes:
        queries: tokens that the store was asked for: those not in an engine's own prefix cache.
        hits: tokens that were loaded from the store.
        local_hits: tokens that engines had in their own prefix caches.
        others: other clients' finished requests, whose tokens are included; at least 1 if there are
            more tokens than the check's, as of requests that run on or whose clients left.
    """

    queries: int = 0
    hits: int = 0
    local_hits: int = 0
    others: int = 0


def eligible_tokens(prompt_tokens: int, chunk_size: int) -> int:
    """Return the tokens that an engine must load of a prompt that is new to it.

    Only whole chunks are stored, so what is beyond the last whole one is recomputed. An engine must
    compute at least one token to have something to sample from, so of a prompt that ends with a
    chunk one token less counts.
    """
    stored = prompt_tokens // chunk_size * chunk_size
    return max(0, min(stored, prompt_tokens - 1))


@dataclass(frozen=True)
class Vllm:
    """The engines' release.

    Attributes:
        version: "" if unknown.
    """

    version: str

    @computed_field
    @property
    def formula_pinned(self) -> bool:
        """The rule for eligible tokens is tested with it."""
        return is_pinned(self.version)


def is_pinned(version: str) -> bool:
    """Tell whether the formula was compared with what this release of vLLM counts."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    return PINNED[0] <= (int(numbers[1]), int(numbers[2])) <= PINNED[1]


def pinned_range() -> str:
    """Return the releases of vLLM that the formula is pinned to."""
    return " to ".join(f"{major}.{minor}" for major, minor in PINNED)
