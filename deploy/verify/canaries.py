"""Prompts that earlier checks left, whose KV stays in the store for later ones.

All other prompts of a check are new, so they say nothing of KV that an older computation left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import computed_field

from deploy.document import FINITE, HIDDEN, Rounded1
from deploy.verify.equivalence import Completion, compare
from deploy.verify.items import CANARIES, Failure

MOST = 4
EXPIRES_S = 14 * 86400.0
# A clock that was wrong for a while; what is from further in the future is not believed.
_EARLY_S = 86400.0
_FORMAT = 2  # in 1, an identity was the seed alone
_TAG = re.compile(r"canary-[0-9a-f]{12}")
_MOST_TOKENS = 1 << 20
_MOST_IDENTITIES = 16
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))

# What a consumer did with a canary; see `Look`.
Outcome = Literal["same", "outdated", "damaged", "foreign", "evicted", "other", "silent"]
_WRONG = ("outdated", "damaged", "foreign")


@dataclass(frozen=True)
class Canary:
    """A prompt whose KV stays in the store, and the answer of the engine that computed it.

    Attributes:
        tag: marks its keys, where engines store tagged prompts.
        left_at: seconds since 1970.
        identity: of the KV: the seed of its keys, and the model's name in them.
        looked_under: other identities under which engines were asked; they may have stored its KV
            anew.
        model: the model's version.
        vllm, lmcache: versions; "" if unknown.
        producer: the engine that computed it.
    """

    tag: str
    left_at: float
    identity: str
    model: str
    vllm: str
    lmcache: str
    producer: str
    prompt: Sequence[int]
    answer: Completion
    looked_under: Sequence[str] = ()

    def is_expired(self, now: float) -> bool:
        """Tell whether it is too old to be kept, or from the future."""
        return not -_EARLY_S <= now - self.left_at <= EXPIRES_S

    def may_be_loaded(self, identity: str) -> bool:
        """Tell whether engines of this identity may have stored its KV."""
        return identity in (self.identity, *self.looked_under)

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in the record."""
        return {
            "tag": self.tag,
            "left_at": self.left_at,
            "identity": self.identity,
            "looked_under": list(self.looked_under),
            "model": self.model,
            "vllm": self.vllm,
            "lmcache": self.lmcache,
            "producer": self.producer,
            "prompt": list(self.prompt),
            "tokens": list(self.answer.tokens),
            "top_logprobs": [dict(step) for step in self.answer.top_logprobs],
        }

    @classmethod
    def from_dict(cls, raw: Any) -> Canary:
        """Return a recorded canary; the record may be damaged, or written by somebody else.

        Raises:
            ValueError: it is no canary.
        """
        try:
            prompt, tokens = list(raw["prompt"]), list(map(_text, raw["tokens"]))
            steps = [
                {_text(token): _number(p) for token, p in s.items()} for s in raw["top_logprobs"]
            ]
            # The tag becomes a part of the pattern by which keys are removed.
            valid = (
                _TAG.fullmatch(_text(raw["tag"]))
                and 0 < len(prompt) < _MOST_TOKENS
                and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
                and 0 < len(tokens) == len(steps)
                and all(steps)
            )
            if not valid:
                raise ValueError("not a canary")
            return cls(
                raw["tag"],
                _number(raw["left_at"]),
                _text(raw["identity"]),
                _text(raw["model"]),
                _text(raw["vllm"]),
                _text(raw["lmcache"]),
                _text(raw["producer"]),
                prompt,
                Completion(tokens, steps, len(prompt)),
                list(map(_text, raw["looked_under"]))[-_MOST_IDENTITIES:],
            )
        except (LookupError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a canary: {exc}") from exc


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError("not a number")
    return float(value)


@dataclass(frozen=True)
class Look:
    """What one consumer did with a prompt of an earlier check.

    Attributes:
        tag: of the canary.
        age_s: seconds since that check stored the prompt's KV.
        outcome: `same`: stored KV gives the answer of a fresh computation. `outdated`: it does not,
            and engines now compute another answer. `damaged`: it does not, and they still compute
            the earlier answer. `foreign`: KV of another identity was loaded. `evicted`: it is gone.
            `other`: it has another identity, and was not found. `silent`: no answer.
        loaded: tokens from the store.
        held: tokens from the consumer's own prefix cache, which it loaded and compared before.
        max_logprob_diff: between the consumer's answer and a fresh computation; None if nothing was
            compared, or if they have no token in common.
    """

    tag: Annotated[str, HIDDEN]
    age_s: Rounded1
    consumer: str
    outcome: Outcome
    loaded: int = 0
    held: int = 0
    max_logprob_diff: Annotated[float | None, FINITE] = None

    @property
    def wrong(self) -> bool:
        """Whether KV answered that must not."""
        return self.outcome in _WRONG


@dataclass(frozen=True)
class Present:
    """What canaries are judged by.

    Attributes:
        identity: of the KV that engines store now.
        now: seconds since 1970.
        tolerance: the largest difference of log-probabilities that passes.
    """

    identity: str
    now: float
    tolerance: float

    def age_s(self, canary: Canary) -> float:
        """Return the seconds since a canary was left."""
        return max(0.0, self.now - canary.left_at)


def judged(
    canary: Canary,
    present: Present,
    consumer: str,
    *,
    fresh: Completion,
    answer: Completion,
    reused: tuple[int, int],
) -> Look:
    """Judge a consumer's answer to a canary.

    Args:
        fresh: the answer of an engine that computed the prompt now.
        reused: the tokens that the consumer loaded, and those that it held itself.
    """
    age_s, (loaded, held) = present.age_s(canary), reused
    identity, tolerance = present.identity, present.tolerance
    if not (loaded or held):
        own = identity == canary.identity
        return Look(canary.tag, age_s, consumer, "evicted" if own else "other")
    result = compare(fresh, answer, tolerance=tolerance)
    outcome: Outcome = "same"
    if loaded and not canary.may_be_loaded(identity):
        outcome = "foreign"
    elif not result.matches:
        as_then = compare(canary.answer, fresh, tolerance=tolerance).matches
        outcome = "damaged" if as_then else "outdated"
    return Look(canary.tag, age_s, consumer, outcome, loaded, held, result.max_logprob_diff)


@dataclass(frozen=True)
class CanaryFindings:
    """Prompts that earlier checks left, whose KV stays in the store.

    Attributes:
        known: canaries that were recorded when the check began.
        looks: one for each consumer and prompt.
        left: this check stored a canary.
        tolerance: the largest difference of log-probabilities that passes.
    """

    known: int = 0
    looks: Sequence[Look] = ()
    left: bool = False
    tolerance: Annotated[float, HIDDEN] = 0.0

    @property
    def compared(self) -> list[Look]:
        """The looks at KV that was still there."""
        return [look for look in self.looks if look.loaded or look.held]

    def count(self, *outcomes: Outcome) -> int:
        """Count the canaries that have one of these outcomes with every consumer."""
        by_canary: dict[str, list[Look]] = {}
        for look in self.looks:
            by_canary.setdefault(look.tag, []).append(look)
        return sum(all(one.outcome in outcomes for one in of) for of in by_canary.values())

    @computed_field
    @property
    def same(self) -> int:
        """Prompts whose KV gave the right answer with every consumer that loaded it."""
        return self.count("same")

    @computed_field
    @property
    def evicted(self) -> int:
        """Prompts whose KV is gone."""
        return self.count("evicted")

    @computed_field
    @property
    def other_identity(self) -> int:
        """Prompts whose KV has another model, version or setting, and was rightly not found."""
        return self.count("other")

    @computed_field
    @property
    def oldest_s(self) -> Rounded1 | None:
        """Age in seconds of the oldest whose KV was still there; None if none was."""
        return max((look.age_s for look in self.compared), default=None)

    def failures(self) -> Iterator[Failure]:
        """Yield a failure for each consumer that answered from wrong KV, with its worst canary."""
        by_consumer: dict[str, list[Look]] = {}
        for look in self.looks:
            if look.wrong:
                by_consumer.setdefault(look.consumer, []).append(look)
        for consumer, looks in by_consumer.items():
            worst = max(looks, key=lambda look: look.max_logprob_diff or 0.0)
            more = f" (and from {len(looks) - 1} more)" if len(looks) > 1 else ""
            yield Failure(CANARIES, f"{consumer} answers from stale KV{more}: {self._said(worst)}")

    def _said(self, look: Look) -> str:
        since = ago(look.age_s)
        diff = look.max_logprob_diff or 0.0
        told = "have no token in common" if math.isinf(diff) else f"differ by {diff:.2f}"
        away = (
            f"a check stored it {since}, and its answer and a fresh computation's {told} "
            f"({self.tolerance:.2f} is tolerated)"
        )
        if look.outcome == "foreign":
            return (
                f"it loaded {look.loaded} tokens that a check stored {since} under another "
                "identity (model, version or settings)"
            )
        if look.outcome == "outdated":
            return f"{away}; engines now compute another answer: KV of an older model or version"
        return f"{away}; engines still compute the same answer: the stored KV was damaged"

    @property
    def cause(self) -> str:
        """What is wrong with the store's KV; "" if nothing is."""
        wrong = [look for look in self.looks if look.wrong]
        if not wrong:
            return ""
        damaged = all(look.outcome == "damaged" for look in wrong)
        kind = "damaged KV" if damaged else "KV of another model, version or settings"
        return f"the store has {kind}, stored {ago(max(look.age_s for look in wrong))}"


def ago(seconds: float) -> str:
    """Return an age in words."""
    for size, unit in _UNITS:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def kept(canaries: Sequence[Canary]) -> tuple[list[Canary], list[Canary]]:
    """Return the canaries to keep, and those that are too many: the oldest and the newest stay."""
    ordered = sorted(canaries, key=lambda one: one.left_at)
    over = max(0, len(ordered) - MOST)
    return [*ordered[:1], *ordered[1 + over :]], ordered[1 : 1 + over]


def from_record(raw: Any) -> tuple[list[Canary], int]:
    """Return the canaries of a record, and the number of its damaged entries.

    Raises:
        ValueError: it is no record.
    """
    if (
        not isinstance(raw, Mapping)
        or raw.get("format") != _FORMAT
        or type(raw.get("canaries")) is not list
    ):
        raise ValueError("not a record of canaries")
    found: dict[str, Canary] = {}
    for one in raw["canaries"][: 4 * MOST]:
        try:
            canary = Canary.from_dict(one)
        except ValueError:
            continue
        found[canary.tag] = canary
    return list(found.values()), len(raw["canaries"]) - len(found)


def as_record(canaries: Sequence[Canary]) -> dict[str, Any]:
    """Return canaries as the record has them."""
    return {"format": _FORMAT, "canaries": [one.as_dict() for one in canaries]}
