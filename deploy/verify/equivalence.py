"""Whether two engines that saw the same prompt answered alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Engines that computed one prompt in different batches, others' requests among them, differed by at
# most 0.17 on the tiny model; what wrong KV of many kinds does is in docs/results/check-power.md.
LOGPROB_TOLERANCE = 0.25


@dataclass(frozen=True)
class Answer:
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
class Comparison:
    """One prompt's answer beside its reference.

    Attributes:
        max_logprob_diff: over the tokens that both list among their likeliest, at every step up to
            and with the first at which the answers part.
        parted_at: the first step with different tokens, or None.
    """

    matches: bool
    max_logprob_diff: float
    parted_at: int | None


def compare(
    reference: Answer, answer: Answer, *, tolerance: float = LOGPROB_TOLERANCE
) -> Comparison:
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
            return Comparison(undecided and worst <= tolerance, worst, step)
    same_length = len(reference.tokens) == len(answer.tokens) > 0
    return Comparison(same_length and worst <= tolerance, worst, None)


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
    """Return how far a token is behind the likeliest; infinite if it is not listed."""
    return max(logprobs.values()) - logprobs.get(token, -math.inf)
