"""Whether two engines that saw the same prompt answered alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

# What is tolerated of engines without noise. Those that computed one prompt in different batches,
# others' requests among them, differed by at most 0.17 on the tiny model; what wrong KV of many
# kinds does is in docs/results/check-power.md.
LOGPROB_TOLERANCE = 0.25
# The tolerance in units of the noise floor. The largest of 100,000 differences of normal noise is
# 4.4 times their root mean square, and some prompts have half as much noise again: 6.6. The largest
# that was seen, in a model in the shape of Qwen2.5-0.5B, was 6.2.
FLOORS = 8
# What is rounded rarely shows in no mean: the largest difference, and as much more as other prompts
# may have. A step of bfloat16 logits of 64 to 128 is 0.5.
_LARGEST = 1.5
# An engine that is further from itself than this does not have noise, but wrong KV.
MOST_NOISE = 0.3


@dataclass(frozen=True)
class Completion:
    """A greedy completion.

    Attributes:
        tokens: the generated token ids, as vLLM writes them ("token_id:17"). Ids, because the texts
            of different tokens can be equal, such as those of halves of a character.
        top_logprobs: for each step, the log-probabilities of the likeliest tokens.
        prompt_tokens: tokens of the prompt, as the engine counted them.
        cached_tokens: tokens of the prompt that the engine did not compute, because they were in
            its own prefix cache or in the store.
    """

    tokens: Sequence[str]
    top_logprobs: Sequence[Mapping[str, float]]
    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class AnswerComparison:
    """One prompt's answer beside its reference.

    Attributes:
        max_logprob_diff: over the tokens that both list among their likeliest, at every step up to
            and with the first at which the answers part.
    """

    matches: bool
    max_logprob_diff: float


@dataclass(frozen=True)
class Noise:
    """How far engines' answers are from their own, once computed and once from their prefix cache.

    Attributes:
        differences: engine → those of log-probabilities; empty if it has no prefix cache.
    """

    differences: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def floor(self) -> float | None:
        """Root mean square over all engines: steadier than the largest. None if not measured."""
        return _root_mean_square(self._every) if self._every else None

    @property
    def tolerance(self) -> float:
        """The largest difference that right KV can explain; bounded, so that it excuses no ruin."""
        every = self._every or [0.0]
        wanted = max(FLOORS * _root_mean_square(every), _LARGEST * max(every))
        return max(LOGPROB_TOLERANCE, min(wanted, FLOORS * MOST_NOISE))

    @property
    def _every(self) -> list[float]:
        return list(chain.from_iterable(self.differences.values()))

    @property
    def contradicting(self) -> dict[str, float]:
        """Engine → its own floor, where that is more than noise."""
        floors = {name: _root_mean_square(found) for name, found in self.differences.items()}
        return {name: floor for name, floor in floors.items() if floor > MOST_NOISE}


def self_differences(computed: Completion, cached: Completion) -> list[float]:
    """Return the differences between two answers of one engine, while both say the same text."""
    found: list[float] = []
    for step, (one, other) in enumerate(
        zip(computed.top_logprobs, cached.top_logprobs, strict=False)
    ):
        shared = [abs(one[token] - other[token]) for token in one if token in other]
        found += [math.inf if math.isnan(value) else value for value in shared or [math.inf]]
        if computed.tokens[step] != cached.tokens[step]:
            break
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))


def compare(
    reference: Completion, answer: Completion, *, tolerance: float = LOGPROB_TOLERANCE
) -> AnswerComparison:
    """Compare two greedy answers token by token and by their log-probabilities.

    Answers may part only where the reference itself was undecided: its two likeliest tokens within
    the tolerance of each other. From there on they continue different texts.
    """
    worst = 0.0
    for step, (expected, actual) in enumerate(
        zip(reference.top_logprobs, answer.top_logprobs, strict=False)
    ):
        worst = max(worst, _largest_difference(expected, actual))
        if reference.tokens[step] != answer.tokens[step]:
            undecided = _behind(expected, answer.tokens[step]) <= tolerance
            return AnswerComparison(undecided and worst <= tolerance, worst)
    same_length = len(reference.tokens) == len(answer.tokens) > 0
    return AnswerComparison(same_length and worst <= tolerance, worst)


def _largest_difference(expected: Mapping[str, float], actual: Mapping[str, float]) -> float:
    """Return the largest difference over the tokens of both lists.

    What only one of them lists is in the other at most as likely as that one's last, which bounds
    its difference from below. Infinite if they share none, or if one is no number: KV with a huge
    value can end in that.
    """
    if not expected.keys() & actual.keys():
        return math.inf
    least = min(expected.values()), min(actual.values())
    differences = [
        abs(expected[token] - actual[token])
        if token in expected and token in actual
        else expected[token] - least[1]
        if token in expected
        else actual[token] - least[0]
        for token in expected.keys() | actual.keys()
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _behind(logprobs: Mapping[str, float], token: str) -> float:
    """Return a lower bound of a token's distance from the likeliest one.

    One that is not listed is no likelier than the last of those that could have been it. Where
    many tokens are about as likely, such as the first six, noise may pick it anyway.
    """
    likeliest, *others = sorted(logprobs.values(), reverse=True)
    return likeliest - logprobs.get(token, others[-1] if others else -math.inf)
