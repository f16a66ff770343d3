"""What a check found, in the shape that `deploy check --json` promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.verify.store_path import StorePath


@dataclass(frozen=True)
class Hits:
    """Tokens that were to be loaded from the store, and those that were.

    Attributes:
        queries: tokens that the consumer asked the store for: all it did not hold itself.
    """

    queries: int = 0
    hits: int = 0
    eligible: int = 0

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.queries + other.queries, self.hits + other.hits, self.eligible + other.eligible
        )

    @property
    def rate(self) -> float:
        """vLLM's own external prefix cache hit rate: hits / queries."""
        return self.hits / self.queries if self.queries else 0.0

    @property
    def eligible_rate(self) -> float:
        """Hits / eligible: 1.0 where all that can be found is found."""
        return self.hits / self.eligible if self.eligible else 0.0


@dataclass(frozen=True)
class PairResult:
    """One producer with one consumer."""

    producer: str
    consumer: str
    hits: Hits

    @property
    def complete(self) -> bool:
        """Exactly what is eligible was loaded; more would be as wrong as less."""
        return self.hits.eligible > 0 and self.hits.hits == self.hits.eligible


@dataclass(frozen=True)
class Equivalence:
    """Answers computed from loaded KV beside answers of an engine that computed it itself."""

    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0


@dataclass(frozen=True)
class StoreUse:
    """How a check filled Redis, everybody's keys counted; None is what Redis does not tell."""

    keys_before: int | None = 0
    keys_after: int | None = 0
    used_memory_bytes: int | None = 0
    evicted_keys: int | None = 0


@dataclass(frozen=True)
class EngineHealth:
    name: str
    role: str
    healthy: bool
    restarts: int


@dataclass(frozen=True)
class Diagnosis:
    """A cause that explains a failure, and the next command to type."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class CheckReport:
    """The whole finding.

    Attributes:
        race: prompts sent through the router, whose decode follows its prefill at once.
        path: what the engines moved to and from Redis meanwhile, for whomever; None where LMCache's
            own client moves it.
        failures: what was asked for and not found, a sentence each; empty if the check passed.
    """

    pairs: Sequence[PairResult]
    race: Hits
    equivalence: Equivalence
    store: StoreUse
    path: StorePath | None
    engines: Sequence[EngineHealth]
    failures: Sequence[str]
    diagnosis: Sequence[Diagnosis]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def total(self) -> Hits:
        return sum((pair.hits for pair in self.pairs), Hits())

    def as_dict(self) -> dict[str, Any]:
        total = self.total
        return {
            "passed": self.passed,
            "hit_rate": {
                "queries": total.queries,
                "hits": total.hits,
                "rate": round(total.rate, 6),
                "eligible": total.eligible,
                "eligible_rate": round(total.eligible_rate, 6),
            },
            "pairs": [
                {
                    "producer": pair.producer,
                    "consumer": pair.consumer,
                    "eligible": pair.hits.eligible,
                    "hits": pair.hits.hits,
                    "eligible_rate": round(pair.hits.eligible_rate, 6),
                }
                for pair in self.pairs
            ],
            "store_race": {
                "gap_s": 0,
                "eligible": self.race.eligible,
                "hits": self.race.hits,
                "eligible_rate": round(self.race.eligible_rate, 6),
            },
            "equivalence": {
                **asdict(self.equivalence),
                "max_logprob_diff": _finite(self.equivalence.max_logprob_diff),
            },
            "redis": asdict(self.store),
            "store_path": self.path.as_dict() if self.path else None,
            "engines": [asdict(engine) for engine in self.engines],
            "failures": list(self.failures),
            "diagnosis": [asdict(cause) for cause in self.diagnosis],
            "seconds": round(self.seconds, 2),
        }


def _finite(value: float) -> float | None:
    """Return None for infinity (answers with no token in common): JSON has no word for it."""
    return round(value, 6) if value != float("inf") else None
