"""What a check measured, and which of it is not as it must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deploy.verify.equivalence import Answer, compare
from deploy.verify.report import EngineHealth, Equivalence, Hits, PairResult
from deploy.verify.store_path import StorePath


@dataclass
class Findings:
    """What accumulates while prompts are sent.

    Attributes:
        race: prompts through the router, whose decode follows its prefill at once.
        expected_chunks, stored_keys: chunks that prompts held, and keys that were stored for them.
            A chunk takes as many keys as its format has parts. None where nobody tells.
        bypassed: prompts through the router that no producer saw.
        not_recomputed: producers whose answer was to be the reference, and came from the store.
        blurred: prompts whose counters others' requests moved as well, time and again.
        path: what went to and from Redis meanwhile; None where the kit does not count it.
        failed: service → what it answered instead of a completion.
    """

    pairs: list[PairResult] = field(default_factory=list)
    race: Hits = field(default_factory=Hits)
    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0
    expected_chunks: int = 0
    stored_keys: int | None = 0
    bypassed: int = 0
    not_recomputed: set[str] = field(default_factory=set)
    blurred: int = 0
    path: StorePath | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def add_stored(self, keys: int | None) -> None:
        """Count keys that were stored; None where nobody tells."""
        if self.stored_keys is not None:
            self.stored_keys = None if keys is None else self.stored_keys + keys

    def add_comparison(self, reference: Answer, answer: Answer) -> None:
        """Count an answer beside the one of an engine that computed the prompt itself."""
        result = compare(reference, answer)
        self.compared += 1
        self.mismatched += not result.matches
        self.max_logprob_diff = max(self.max_logprob_diff, result.max_logprob_diff)

    @property
    def equivalence(self) -> Equivalence:
        return Equivalence(self.compared, self.mismatched, self.max_logprob_diff)

    @property
    def missed(self) -> bool:
        """Whether some pair loaded something else than what was eligible."""
        return any(not pair.complete for pair in self.pairs)


def failures(
    found: Findings, engines: Sequence[EngineHealth], *, store_answers: bool
) -> Iterator[str]:
    """Yield a sentence for each thing that is not as it must be; none for a sound stack."""
    for pair in found.pairs:
        if not pair.complete:
            yield (
                f"{pair.producer} → {pair.consumer}: {pair.hits.hits} of {pair.hits.eligible} "
                "eligible tokens were loaded from the store"
            )
    if found.mismatched:
        yield f"{found.mismatched} of {found.compared} answers differ from recomputed ones"
    for name in sorted(found.not_recomputed):
        yield f"{name} loaded from the store what it was to compute, so no answer was compared"
    if found.bypassed:
        yield f"{found.bypassed} prompts through the router reached no producer"
    for name, answer in found.failed.items():
        yield f"{name} did not answer: {answer}"
    for engine in engines:
        if not engine.healthy:
            yield f"{engine.name} is not healthy"
    if not store_answers:
        yield "Redis does not answer"
    elif found.stored_keys == 0:
        yield "no key was added to Redis"
    if found.path:
        yield from _lost(found.path)
    if found.blurred:
        yield "requests of others moved the counters during the check, so hits cannot be told apart"


def _lost(path: StorePath) -> Iterator[str]:
    if path.refused:
        yield f"{path.refused:.0f} values in Redis were not what was stored"
    if path.left_out:
        yield f"{path.left_out:.0f} chunks were not stored"
