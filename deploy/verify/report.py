"""What a check found, in the shape that `deploy check --json` promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from deploy.verify.eligible import is_pinned
from deploy.verify.equivalence import LOGPROB_TOLERANCE
from deploy.verify.own_prompt import OwnPrompt
from deploy.verify.store_path import StorePath

# What is checked beside the pairs, as people and JUnit files name it.
PROMPTS = "prompts"
ROUTER = "router, no gap"
TURNS = "several turns"
DECODE_REUSE = "decode reuse"
BURST = "burst"
OWN_PROMPT = "your prompt"
EQUIVALENCE = "equivalence"
STORE = "redis"
ENGINES = "engines"


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
    def name(self) -> str:
        return f"{self.producer} → {self.consumer}"

    @property
    def complete(self) -> bool:
        """Exactly what is eligible was loaded; more would be as wrong as less."""
        return self.hits.eligible > 0 and self.hits.hits == self.hits.eligible


@dataclass(frozen=True)
class Phase:
    """Prompts of one kind beside the pairs.

    Attributes:
        failed: of the requests, those that were not answered.
        skipped: why there were none; "" where there were.
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

    def as_dict(self) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Counted:
    """What vLLM itself counted on the consumers meanwhile, in tokens.

    Attributes:
        queries, hits: of the store: prefix cache queries are the tokens an engine had not itself.
        local_hits: tokens that engines had in their own prefix caches.
        others: requests of others that engines finished meanwhile, whose tokens are among it; at
            least 1 where only tokens tell of them, since they are not done or their clients left.
    """

    queries: int = 0
    hits: int = 0
    local_hits: int = 0
    others: int = 0


@dataclass(frozen=True)
class Equivalence:
    """Answers computed from loaded KV beside answers of an engine that computed it itself.

    Attributes:
        noise_floor: root mean square of what engines differ by from themselves, between a computed
            answer and one from their own prefix cache; None where no engine has one.
        tolerance: the largest difference that passes, by that floor.
    """

    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0
    noise_floor: float | None = None
    tolerance: float = LOGPROB_TOLERANCE


@dataclass(frozen=True)
class StoreUse:
    """How a check filled Redis, everybody's keys counted; None is what Redis does not tell.

    Attributes:
        keys_after: when all prompts were answered, before the check removed its own keys.
        max_memory_bytes: 0 where there is no limit.
        keys_removed: the check's own.
    """

    keys_before: int | None = 0
    keys_after: int | None = 0
    used_memory_bytes: int | None = 0
    max_memory_bytes: int | None = 0
    evicted_keys: int | None = 0
    keys_removed: int | None = 0


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


class Failure(NamedTuple):
    """What was asked for and not found: which item of the check, and a sentence."""

    item: str
    sentence: str


@dataclass(frozen=True)
class CheckReport:
    """The whole finding.

    Attributes:
        race: prompts sent through the router, whose decode follows its prefill at once.
        turns, decode_reuse, burst: None where the check was a quick one, or the stack does not keep
            what it decodes.
        store: None where the engines share no KV, or not through Redis.
        path: what the engines moved to and from Redis meanwhile, for whomever; None where LMCache's
            own client moves it.
        others: requests of others that engines finished during the check; at least 1 where some
            were begun only.
        vllm: the engines' release of it; "" where they do not tell.
        prompts: the user's own prompt, by pair; empty where none was given.
        left_out: what was not checked, and why.
        failed: empty if the check passed.
    """

    pairs: Sequence[PairResult]
    race: Phase
    equivalence: Equivalence
    store: StoreUse | None
    path: StorePath | None
    engines: Sequence[EngineHealth]
    failed: Sequence[Failure]
    diagnosis: Sequence[Diagnosis]
    seconds: float
    turns: Phase | None = None
    decode_reuse: Phase | None = None
    burst: Phase | None = None
    counted: Counted = Counted()
    others: int = 0
    vllm: str = ""
    prompts: Sequence[OwnPrompt] = ()
    left_out: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failures(self) -> list[str]:
        """A sentence for each thing that was asked for and not found."""
        return [failure.sentence for failure in self.failed]

    @property
    def total(self) -> Hits:
        return sum((pair.hits for pair in self.pairs), Hits())

    @property
    def items(self) -> dict[str, list[str]]:
        """Everything that was checked, each with the sentences of what failed of it."""
        phases = {TURNS: self.turns, DECODE_REUSE: self.decode_reuse, BURST: self.burst}
        names = [
            *(pair.name for pair in self.pairs),
            ROUTER,
            *(name for name, phase in phases.items() if phase and not phase.skipped),
            *([OWN_PROMPT] if self.prompts else []),
            EQUIVALENCE,
            *([STORE] if self.store else []),
            ENGINES,
        ]
        found: dict[str, list[str]] = {name: [] for name in names}
        for item, sentence in self.failed:
            found.setdefault(item, []).append(sentence)
        return found

    def as_dict(self) -> dict[str, Any]:
        total = self.total
        phases = {"turns": self.turns, "decode_reuse": self.decode_reuse, "burst": self.burst}
        return {
            "passed": self.passed,
            "hit_rate": {
                "queries": total.queries,
                "hits": total.hits,
                "rate": round(total.rate, 6),
                "eligible": total.eligible,
                "eligible_rate": round(total.eligible_rate, 6),
            },
            "counted": asdict(self.counted),
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
                "eligible": self.race.hits.eligible,
                "hits": self.race.hits.hits,
                "eligible_rate": round(self.race.hits.eligible_rate, 6),
                "blurred": self.race.blurred,
            },
            **{name: phase.as_dict() if phase else None for name, phase in phases.items()},
            "equivalence": {
                **asdict(self.equivalence),
                "max_logprob_diff": _finite(self.equivalence.max_logprob_diff),
                "noise_floor": _finite(self.equivalence.noise_floor),
                "tolerance": round(self.equivalence.tolerance, 6),
            },
            "redis": asdict(self.store) if self.store else None,
            "store_path": self.path.as_dict() if self.path else None,
            "engines": [asdict(engine) for engine in self.engines],
            "others_requests": self.others,
            "vllm": {"version": self.vllm, "formula_pinned": is_pinned(self.vllm)},
            "prompts": [prompt.as_dict() for prompt in self.prompts],
            "left_out": list(self.left_out),
            "failures": self.failures,
            "diagnosis": [asdict(cause) for cause in self.diagnosis],
            "seconds": round(self.seconds, 2),
        }


def _finite(value: float | None) -> float | None:
    """Return None for infinity (answers with no token in common): JSON has no word for it."""
    return None if value is None or value == float("inf") else round(value, 6)
