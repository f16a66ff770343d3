"""What a check found, in the shape that `deploy check --json` promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deploy.verify.canaries import CanaryFindings
from deploy.verify.equivalence import LOGPROB_TOLERANCE
from deploy.verify.hits import Counted, Hits, PairResult, Phase, is_pinned
from deploy.verify.items import (
    BURST,
    CANARIES,
    DECODE_REUSE,
    ENGINES,
    EQUIVALENCE,
    OWN_PROMPT,
    ROUTER,
    SECOND_TIER,
    STORE,
    TURNS,
    Failure,
)
from deploy.verify.own_prompt import OwnPrompt
from deploy.verify.store_path import StorePath


@dataclass(frozen=True)
class Equivalence:
    """Answers from loaded KV, compared with those of an engine that computed it itself.

    Attributes:
        noise_floor: root mean square of the differences between an engine's computed answer and its
            answer from its own prefix cache; None if no engine has one.
        tolerance: the largest difference that passes; it follows from the noise floor.
    """

    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0
    noise_floor: float | None = None
    tolerance: float = LOGPROB_TOLERANCE


@dataclass(frozen=True)
class StoreUse:
    """How a check filled Redis, with all clients' keys; None is what its user may not see.

    Attributes:
        keys_after: when all prompts were answered, before the check removed its own keys.
        max_memory_bytes: 0 if there is no limit.
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
    """The state of one engine during a check."""

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
        turns, decode_reuse, second_tier, burst: None if the check was a quick one, the stack
            does not keep what it decodes, or Redis is its only tier.
        store: None if the engines share no KV, or do not use Redis themselves.
        path: what engines, or LMCache's server, moved to and from Redis meanwhile, for whomever;
            None if LMCache's own client moves it.
        others: requests of others that engines finished during the check; at least 1 if some
            were begun only.
        vllm: the engines' version of vLLM; "" if unknown.
        prompts: the user's own prompt, by pair; empty if none was given.
        left_out: what was not checked, and why.
        canaries: what became of prompts of earlier checks; None if none can be left here.
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
    second_tier: Phase | None = None
    burst: Phase | None = None
    counted: Counted = field(default_factory=Counted)
    others: int = 0
    vllm: str = ""
    prompts: Sequence[OwnPrompt] = ()
    left_out: Sequence[str] = ()
    canaries: CanaryFindings | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failures(self) -> list[str]:
        """A sentence for each failure."""
        return [failure.sentence for failure in self.failed]

    @property
    def total(self) -> Hits:
        """The hits of all pairs together."""
        return sum((pair.hits for pair in self.pairs), Hits())

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases that this check has beside the pairs, those that were skipped too."""
        found = {
            TURNS: self.turns,
            DECODE_REUSE: self.decode_reuse,
            SECOND_TIER: self.second_tier,
            BURST: self.burst,
        }
        return {name: phase for name, phase in found.items() if phase}

    @property
    def items(self) -> dict[str, list[str]]:
        """Everything that was checked, each with the sentences of what failed of it."""
        names = [
            *(pair.name for pair in self.pairs),
            ROUTER,
            *(name for name, phase in self.phases.items() if not phase.skipped),
            *([OWN_PROMPT] if self.prompts else []),
            *([CANARIES] if self.canaries and self.canaries.looks else []),
            EQUIVALENCE,
            *([STORE] if self.store else []),
            ENGINES,
        ]
        found: dict[str, list[str]] = {name: [] for name in names}
        for item, sentence in self.failed:
            found.setdefault(item, []).append(sentence)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `check --json` shows it; the schema says what each field means."""
        total = self.total
        phases = {
            "turns": self.turns,
            "decode_reuse": self.decode_reuse,
            "second_tier": self.second_tier,
            "burst": self.burst,
        }
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
                    "tiers": asdict(pair.tiers) if pair.tiers else None,
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
            "canaries": self.canaries.as_dict() if self.canaries else None,
            "left_out": list(self.left_out),
            "failures": self.failures,
            "diagnosis": [asdict(cause) for cause in self.diagnosis],
            "seconds": round(self.seconds, 2),
        }


def _finite(value: float | None) -> float | None:
    """Return None for infinity (answers with no token in common): JSON has no word for it."""
    return None if value is None or value == float("inf") else round(value, 6)
