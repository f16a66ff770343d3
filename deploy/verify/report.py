"""What a check found, in the shape that `deploy check --json` promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, computed_field

from deploy.document import FINITE, HIDDEN, OPTIONAL, Finite, Rounded, Rounded2, as_document
from deploy.planning.redis_memory import RedisMemory
from deploy.verify.canaries import CanaryFindings
from deploy.verify.equivalence import LOGPROB_TOLERANCE
from deploy.verify.hits import Counted, Hits, PairResult, Phase, StoreRace, Vllm
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
from deploy.verify.store_path import RedisTraffic, StorePath


@dataclass(frozen=True)
class Equivalence:
    """Answers from loaded KV, compared with those of an engine that computed it itself.

    Attributes:
        compared: pairs of answers.
        mismatched: pairs that differ by more than the tolerance.
        max_logprob_diff: None if two answers have no token in common.
        noise_floor: root mean square of the differences between an engine's computed answer and its
            answer from its own prefix cache; None if no engine has one.
        tolerance: the largest difference that passes; it follows from the noise floor.
    """

    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: Finite = 0.0
    noise_floor: Annotated[float | None, FINITE] = None
    tolerance: Rounded = LOGPROB_TOLERANCE


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

    @property
    def memory(self) -> RedisMemory:
        """How full it is."""
        return RedisMemory(self.used_memory_bytes, self.max_memory_bytes)


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


_NOTHING = Counted()


def _traffic(path: StorePath | None) -> dict[str, Any] | None:
    return path.as_dict() if path else None


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    Attributes:
        pairs: hits of each pair.
        engines: state of each engine after the check.
        vllm: which rule counts what can be a hit.
        counted: what vLLM itself counted on the consumers meanwhile.
        turns, decode_reuse, burst: None if the check was a quick one, or cannot test that.
        second_tier: a prompt that LMCache's server has in Redis only; None if there is no such
            server, or the check was a quick one.
        redis: None if engines share no KV, or do not use Redis themselves.
        store_path: what engines, or LMCache's server, moved to and from Redis meanwhile, for
            whomever; None if LMCache's own client moves KV.
        others_requests: other clients' requests that engines finished meanwhile; at least 1 if
            some were begun only.
        prompts: the user's own prompt, by pair; empty without `--prompt-file`.
        canaries: None if the engines share no KV or do not all run the same, their keys could not
            be removed again, or the check ran in a cluster.
        left_out: what was not checked, and why; a sentence each.
        diagnosis: causes, the most likely first.
        seconds: how long it took.
        runs, runs_passed, slowest_s: with `--repeat`.
    """

    pairs: Sequence[PairResult]
    race: Annotated[
        Phase,
        PlainSerializer(Phase.race, return_type=StoreRace),
        Field(serialization_alias="store_race"),
    ]
    equivalence: Equivalence
    store: Annotated[StoreUse | None, Field(serialization_alias="redis")]
    path: Annotated[
        StorePath | None,
        PlainSerializer(_traffic, return_type=RedisTraffic | None),
        Field(serialization_alias="store_path"),
    ]
    engines: Sequence[EngineHealth]
    failed: Annotated[Sequence[Failure], HIDDEN]
    diagnosis: Sequence[Diagnosis]
    seconds: Rounded2
    turns: Phase | None = None
    decode_reuse: Phase | None = None
    second_tier: Phase | None = None
    burst: Phase | None = None
    counted: Counted = _NOTHING
    others: Annotated[int, Field(serialization_alias="others_requests")] = 0
    vllm: Annotated[str, PlainSerializer(Vllm, return_type=Vllm)] = ""
    prompts: Sequence[OwnPrompt] = ()
    left_out: Sequence[str] = ()
    canaries: CanaryFindings | None = None
    runs: Annotated[int | None, OPTIONAL] = None
    runs_passed: Annotated[int | None, OPTIONAL] = None
    slowest_s: Annotated[Rounded2 | None, OPTIONAL] = None

    @computed_field
    @property
    def passed(self) -> bool:
        """Nothing is wrong."""
        return not self.failed

    @computed_field
    @property
    def failures(self) -> list[str]:
        """A sentence for each thing that is wrong."""
        return [failure.sentence for failure in self.failed]

    @computed_field(alias="hit_rate")
    @property
    def total(self) -> Hits:
        """Hits of all pairs together."""
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
        """Return the report as `check --json` shows it."""
        return as_document(self)
