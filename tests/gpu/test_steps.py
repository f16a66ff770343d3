"""A consumer's first step: of which kind it is, and whether its KV is loaded before it."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.verify.hits import eligible_tokens
from tests.gpu.facts import LOGPROBS_PROMPT, PROMPTS

CHUNK = 256
Facts = dict[str, Any]


def stored(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


@pytest.mark.parametrize("how", ["pinned, fixed", "pinned, unfixed", "unpinned, fixed"])
def test_what_was_found_is_loaded(facts: Facts, how: str) -> None:
    loaded = {tokens: facts["steps"][how][str(tokens)]["loaded"] for tokens in PROMPTS}
    assert loaded == {tokens: stored(tokens) for tokens in PROMPTS}


def test_without_fix_and_pins_a_full_graph_runs_on_unwritten_kv(facts: Facts) -> None:
    steps = facts["steps"]["unpinned, unfixed"]
    lost = {int(tokens) for tokens, step in steps.items() if step["loaded"] == 0}
    assert lost == {512, 513}
    assert lost == {int(tokens) for tokens, step in steps.items() if step["kind"] == "FULL"}


@pytest.mark.parametrize("how", ["pinned, fixed", "unpinned, fixed"])
def test_kinds_of_steps(facts: Facts, how: str) -> None:
    kinds = {tokens: facts["steps"][how][str(tokens)]["kind"] for tokens in PROMPTS}
    assert kinds == {tokens: "FULL" if tokens in (512, 513) else "PIECEWISE" for tokens in PROMPTS}


@pytest.mark.parametrize("how", ["pinned, fixed", "unpinned, fixed"])
def test_what_is_eligible_is_not_computed(facts: Facts, how: str) -> None:
    computed = {tokens: facts["steps"][how][str(tokens)]["computes"] for tokens in PROMPTS}
    assert computed == {tokens: tokens - eligible_tokens(tokens, CHUNK) for tokens in PROMPTS}


def test_a_stored_prompt_whose_logprobs_are_requested_is_computed(facts: Facts) -> None:
    step = facts["prompt logprobs"]["fixed"]
    assert (step["computes"], step["loaded"]) == (LOGPROBS_PROMPT, 0)


def test_without_the_fix_the_scheduler_of_the_catalogues_pair_loads_it(facts: Facts) -> None:
    """Newer vLLM ignores what a connector offers for such a prompt."""
    step = facts["prompt logprobs"]["unfixed"]
    taken = stored(LOGPROBS_PROMPT) if facts["pair"] == "catalogue" else 0
    assert (step["computes"], step["loaded"]) == (LOGPROBS_PROMPT - taken, taken)


def test_a_failed_load_is_computed_again_and_nothing_more(facts: Facts) -> None:
    assert facts["recomputed"]["pinned"] == 512


def test_with_asynchronous_scheduling_a_placeholder_is_computed_too(facts: Facts) -> None:
    assert facts["recomputed"]["asynchronous"] == 513
