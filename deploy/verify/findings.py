"""What a check measured, and what of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deploy.verify.canaries import CanaryFindings
from deploy.verify.equivalence import MOST_NOISE, Completion, Noise, compare, self_differences
from deploy.verify.hits import Counted, Hits, PairResult, Phase
from deploy.verify.items import (
    BURST,
    DECODE_REUSE,
    ENGINES,
    EQUIVALENCE,
    OWN_PROMPT,
    PROMPTS,
    ROUTER,
    SECOND_TIER,
    STORE,
    TURNS,
    Failure,
)
from deploy.verify.own_prompt import OwnPrompt
from deploy.verify.report import EngineHealth, Equivalence
from deploy.verify.store_path import StorePath

# Pairs of prompts, asked at once of a plain engine in bfloat16 on a processor with AMX, and each
# alone: in 40 checks the largest difference was once 8.3 noise floors, and otherwise at most 6.
_BATCHED = 2


@dataclass
class Findings:
    """What accumulates while prompts are sent.

    Attributes:
        race: prompts through the router, whose decode follows its prefill at once.
        expected_chunks, stored_keys: chunks that prompts held, and keys that were stored for them.
            A chunk takes as many keys as its format has parts. None if unknown.
        past_server: pair → tokens that came from Redis, though LMCache's server had just got them.
        bypassed: prompts through the router that no producer saw.
        unreached: aggregated engines to which the router sent no prompt.
        not_recomputed: producers whose answer was to be the reference, and came from the store.
        counted: what vLLM counted while the pairs were checked.
        others: requests of other clients during the check.
        path: what went to and from Redis meanwhile; None if the kit does not count it.
        failed: service → what it answered instead of a completion.
        too_short: why no prompt can have a whole chunk; "" if it can.
        restarted: engines that ended during the check and run again.
        ended: engines that ended during the check and were not restarted.
        vanished: keys that had arrived and were gone when their chunks were not found.
        prompts: the user's own prompt, by pair.
        canaries: results of the canaries of earlier checks; None if this stack cannot keep any.
        noise: how much an engine's answers differ from its own; measured before any comparison.
    """

    pairs: list[PairResult] = field(default_factory=list)
    race: Phase = field(default_factory=Phase)
    turns: Phase | None = None
    decode_reuse: Phase | None = None
    second_tier: Phase | None = None
    burst: Phase | None = None
    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0
    expected_chunks: int = 0
    stored_keys: int | None = 0
    past_server: dict[str, int] = field(default_factory=dict)
    bypassed: int = 0
    unreached: set[str] = field(default_factory=set)
    not_recomputed: set[str] = field(default_factory=set)
    counted: Counted = field(default_factory=Counted)
    others: int = 0
    path: StorePath | None = None
    failed: dict[str, str] = field(default_factory=dict)
    too_short: str = ""
    restarted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    vanished: int = 0
    prompts: list[OwnPrompt] = field(default_factory=list)
    canaries: CanaryFindings | None = None
    noise: Noise = field(default_factory=Noise)

    def add_stored(self, keys: int | None) -> None:
        """Count keys that were stored; None if unknown."""
        if self.stored_keys is not None:
            self.stored_keys = None if keys is None else self.stored_keys + keys

    def add_noise(self, engine: str, computed: Completion, cached: Completion) -> None:
        """Take in two answers of an engine to one prompt, unless it has no prefix cache."""
        if cached.cached_tokens and not computed.cached_tokens:
            known = self.noise.differences
            found = [*known.get(engine, ()), *self_differences(computed, cached)]
            self.noise = Noise({**known, engine: found})

    def add_comparison(
        self, reference: Completion, answer: Completion, *, batched: bool = False
    ) -> None:
        """Count an answer beside the one of an engine that computed the prompt itself.

        Args:
            batched: the answer was computed in a batch with others, which rounds in other places
                than the noise floor knows. No KV is loaded, so there is none to excuse.
        """
        tolerance = self.noise.tolerance * (_BATCHED if batched else 1)
        result = compare(reference, answer, tolerance=tolerance)
        self.compared += 1
        self.mismatched += not result.matches
        self.max_logprob_diff = max(self.max_logprob_diff, result.max_logprob_diff)

    def leave_out(self, why: str) -> None:
        """Note that neither conversations nor bursts are held."""
        self.turns = self.burst = Phase(skipped=why)

    @property
    def nothing_loaded(self) -> bool:
        """Whether no pair, and nothing through the router, loaded a single token."""
        return not (self.race.hits.hits or any(pair.hits.hits for pair in self.pairs))

    @property
    def equivalence(self) -> Equivalence:
        """How the compared answers agreed, beside how far each engine agrees with itself."""
        return Equivalence(
            self.compared,
            self.mismatched,
            self.max_logprob_diff,
            self.noise.floor,
            self.noise.tolerance,
        )

    @property
    def missed(self) -> bool:
        """Whether something else was loaded than what was eligible."""
        some = (self.race, self.turns, self.decode_reuse, self.second_tier)
        phases = [phase for phase in some if phase]
        return (
            any(not pair.complete for pair in self.pairs)
            or any(phase.hits.hits != phase.hits.eligible for phase in phases if not phase.blurred)
            or any(prompt.missed for prompt in self.prompts)
        )

    @property
    def only_redis_missed(self) -> bool:
        """Whether the pairs got all KV from LMCache's server, and it then got none from Redis."""
        second = self.second_tier
        return (
            all(pair.complete for pair in self.pairs)
            and second is not None
            and second.hits.hits < second.hits.eligible
        )

    @property
    def miscounted(self) -> bool:
        """Whether vLLM, without other clients, counted other hits than its answers report."""
        told = sum(pair.hits.hits for pair in self.pairs)
        return not (self.counted.others or self.failed) and self.counted.hits != told


def failures(
    found: Findings,
    engines: Sequence[EngineHealth],
    *,
    store_answers: bool | None,
    least: float = 1.0,
) -> Iterator[Failure]:
    """Yield each thing that is wrong; none for a healthy stack.

    Args:
        store_answers: None if the engines share no store.
        least: the eligible hit rate that must be reached; 1 asks for exactly what is eligible.
    """
    if found.too_short:
        yield Failure(PROMPTS, found.too_short)
    yield from _pair_failures(found, least)
    phases = (
        (ROUTER, found.race),
        (TURNS, found.turns),
        (DECODE_REUSE, found.decode_reuse),
        (SECOND_TIER, found.second_tier),
    )
    for name, phase in phases:
        judged = phase and phase.hits.eligible and not phase.blurred
        if phase and judged and not least <= phase.hits.eligible_rate <= 1.0:
            yield Failure(name, f"{name}: {_loaded(phase.hits)}")
    if found.burst:
        yield from _burst_failures(found.burst)
    for prompt in found.prompts:
        if prompt.under_chunk or prompt.missed:
            yield Failure(OWN_PROMPT, prompt.sentence)
    yield from found.canaries.failures() if found.canaries else ()
    yield from _not_equivalent(found)
    yield from _misrouted(found)
    yield from _sick(found, engines)
    if store_answers is False:
        yield Failure(STORE, "Redis does not answer")
    elif store_answers and found.stored_keys == 0 and not found.too_short:
        yield Failure(STORE, "no key was added to Redis")
    if found.path:
        yield from _lost(found.path)


def _pair_failures(found: Findings, least: float) -> Iterator[Failure]:
    for pair in found.pairs:
        if not pair.complete and not 1.0 > least <= pair.hits.eligible_rate <= 1.0:
            yield Failure(pair.name, f"{pair.name}: {_loaded(pair.hits)}")
    for name, tokens in found.past_server.items():
        if not found.others:
            yield Failure(
                name,
                f"{name}: {tokens} tokens came from Redis, and not from the memory of LMCache's "
                "server, which had just got them",
            )


def _misrouted(found: Findings) -> Iterator[Failure]:
    if found.bypassed:
        yield Failure(ROUTER, f"{found.bypassed} prompts through the router reached no producer")
    for name in sorted(found.unreached):
        yield Failure(ROUTER, f"no prompt through the router reached {name}")


def _burst_failures(burst: Phase) -> Iterator[Failure]:
    """Yield failures of a burst. Too few hits are none: staging memory may run short."""
    if burst.failed:
        yield Failure(BURST, f"{burst.failed} of {burst.requests} requests at once failed")
    if burst.hits.hits > burst.hits.eligible and not burst.blurred:
        yield Failure(BURST, f"{BURST}: {_loaded(burst.hits)}")


def _loaded(hits: Hits) -> str:
    return f"{hits.hits} of {hits.eligible} eligible tokens were loaded from the store"


def _not_equivalent(found: Findings) -> Iterator[Failure]:
    if found.mismatched:
        yield Failure(
            EQUIVALENCE,
            f"{found.mismatched} of {found.compared} answers differ from recomputed ones",
        )
    for name, floor in sorted(found.noise.contradicting.items()):
        yield Failure(
            EQUIVALENCE,
            f"{name} contradicts itself: answers from its own prefix cache differ from computed "
            f"ones by {floor:.2f} (root mean square), more than rounding explains ({MOST_NOISE})",
        )
    for name in sorted(found.not_recomputed):
        yield Failure(
            EQUIVALENCE,
            f"{name} loaded from the store what it should have computed, so no answer was compared",
        )
    if found.miscounted:
        yield Failure(
            EQUIVALENCE,
            f"vLLM's counters say that {found.counted.hits} tokens were loaded by the pairs' "
            f"consumers, its answers say {sum(pair.hits.hits for pair in found.pairs)}",
        )


def _sick(found: Findings, engines: Sequence[EngineHealth]) -> Iterator[Failure]:
    for name, answer in found.failed.items():
        yield Failure(ENGINES, f"{name} did not answer: {answer}")
    for name in found.restarted:
        yield Failure(ENGINES, f"{name} was restarted during the check")
    for name in found.ended:
        yield Failure(ENGINES, f"{name} exited during the check")
    for engine in engines:
        if not engine.healthy and engine.name not in found.ended:
            yield Failure(ENGINES, f"{engine.name} is not healthy")


def _lost(path: StorePath) -> Iterator[Failure]:
    if path.refused:
        yield Failure(STORE, f"{path.refused:.0f} values in Redis were not what was stored")
    if path.left_out:
        yield Failure(STORE, f"{path.left_out:.0f} chunks were not stored")
