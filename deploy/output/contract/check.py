"""The data of `deploy check`, which `up`, `swap` and `rollback` contain, too."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict

from deploy.output.contract.dataclass_document import with_fields_of
from deploy.verify import own_prompt, report
from deploy.verify.hits import Counted, Hits, Tiers
from deploy.verify.report import Diagnosis, EngineHealth, StoreUse
from deploy.verify.store_path import StorePath


@with_fields_of(Hits)
class HitRate(TypedDict):
    """All pairs together, in tokens.

    Attributes:
        queries: tokens that the store was asked for.
        hits: tokens that were loaded from it.
        rate: vLLM's external prefix cache hit rate, hits / queries.
        eligible: what a healthy stack must load.
        eligible_rate: hits / eligible.
    """

    rate: float
    eligible_rate: float


class Pair(TypedDict):
    """One producer with one consumer, in tokens.

    Attributes:
        tiers: where the consumer got the KV of its prompts from; null if others' requests changed
            the counters, or LMCache's server does not tell.
    """

    producer: str
    consumer: str
    eligible: int
    hits: int
    eligible_rate: float
    tiers: Tiers | None


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


class Phase(TypedDict):
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


@with_fields_of(report.Equivalence)
class Equivalence(TypedDict):
    """Answers from loaded KV, compared with answers that were computed.

    Attributes:
        compared: pairs of answers.
        mismatched: pairs that differ by more than the tolerance.
        max_logprob_diff: null if two answers have no token in common.
    """

    max_logprob_diff: float | None


@with_fields_of(StorePath)
class RedisTraffic(TypedDict):
    """What engines moved to and from Redis.

    Attributes:
        waits: answers that waited for their KV to be stored.
        late: answers that were sent before their KV was stored.
    """

    load_gb_s: float
    store_gb_s: float
    lookup_ms: float


class Vllm(TypedDict):
    """The engines' release.

    Attributes:
        version: "" if unknown.
        formula_pinned: the rule for eligible tokens is tested with it.
    """

    version: str
    formula_pinned: bool


@with_fields_of(own_prompt.OwnPrompt)
class OwnPrompt(TypedDict):
    """The prompt of `--prompt-file`, through one pair, in tokens.

    Attributes:
        producer_local, local: what the engine had in its own prefix cache.
        producer_loaded, loaded: what it loaded from the store.
        chunks: whole chunks of the prompt.
    """

    chunks: int
    eligible: int


class CanaryLook(TypedDict):
    """One consumer and one prompt of an earlier check.

    Attributes:
        age_s: seconds since that check stored the prompt's KV.
        outcome: `same`: stored KV gives the answer of a fresh computation. `outdated`: it does not,
            and engines now compute another answer. `damaged`: it does not, and they still compute
            the earlier answer. `foreign`: KV of another identity was loaded. `evicted`: it is gone.
            `other`: it has another identity, and was not found. `silent`: no answer.
        loaded: tokens from the store.
        held: tokens from the consumer's own prefix cache, which it loaded and compared before.
        max_logprob_diff: between the consumer's answer and a fresh computation; null if nothing was
            compared, or if they have no token in common.
    """

    age_s: float
    consumer: str
    outcome: Literal["same", "outdated", "damaged", "foreign", "evicted", "other", "silent"]
    loaded: int
    held: int
    max_logprob_diff: float | None


class Canaries(TypedDict):
    """Prompts that earlier checks left, whose KV stays in the store.

    Attributes:
        known: how many were recorded when the check began.
        same: prompts whose KV gave the right answer with every consumer that loaded it.
        evicted: prompts whose KV is gone.
        other_identity: prompts whose KV belongs to another model, version or setting, and was
            rightly not found.
        oldest_s: age in seconds of the oldest whose KV was still there; null if none was.
        left: this check left one.
        looks: one for each consumer and prompt.
    """

    known: int
    same: int
    evicted: int
    other_identity: int
    oldest_s: float | None
    left: bool
    looks: list[CanaryLook]


class Check(TypedDict):
    """The result of a check.

    Attributes:
        passed: nothing is wrong.
        counted: what vLLM itself counted on the consumers meanwhile.
        turns, decode_reuse, burst: null if the check was a quick one, or cannot test that.
        second_tier: a prompt that LMCache's server has in Redis only; null if there is no such
            server, or the check was a quick one.
        redis: null if engines share no KV, or do not use Redis themselves.
        store_path: null if LMCache's own client moves KV.
        others_requests: other clients' requests that engines finished meanwhile.
        prompts: empty without `--prompt-file`.
        canaries: null if the engines share no KV or do not all run the same, their keys could not
            be removed again, or the check ran in a cluster.
        left_out: what was not checked, and why; a sentence each.
        failures: a sentence for each thing that is wrong.
        diagnosis: causes, the most likely first.
        seconds: how long it took.
        runs, runs_passed, slowest_s: with `--repeat`.
    """

    passed: bool
    hit_rate: HitRate
    counted: Counted
    pairs: list[Pair]
    store_race: StoreRace
    turns: Phase | None
    decode_reuse: Phase | None
    second_tier: Phase | None
    burst: Phase | None
    equivalence: Equivalence
    redis: StoreUse | None
    store_path: RedisTraffic | None
    engines: list[EngineHealth]
    others_requests: int
    vllm: Vllm
    prompts: list[OwnPrompt]
    canaries: Canaries | None
    left_out: list[str]
    failures: list[str]
    diagnosis: list[Diagnosis]
    seconds: float
    runs: NotRequired[int]
    runs_passed: NotRequired[int]
    slowest_s: NotRequired[float]
