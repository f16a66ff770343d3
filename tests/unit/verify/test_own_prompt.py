"""Where a prompt of the user's own came from, and why not from the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.verify.findings import Findings, failures
from deploy.verify.own_prompt import OwnPrompt

PROMPT = OwnPrompt("producer-0", "consumer-0", tokens=811, chunk_size=256, loaded=768)


def test_a_prompt_loaded_whole_is_a_hit() -> None:
    assert PROMPT.hit and not PROMPT.hidden and not PROMPT.missed and not PROMPT.sentence
    assert (PROMPT.chunks, PROMPT.eligible) == (3, 768)


@pytest.mark.parametrize("tokens", [0, 3, 255])
def test_a_prompt_without_a_whole_chunk_is_named(tokens: int) -> None:
    short = replace(PROMPT, tokens=tokens, loaded=0)
    assert short.under_chunk and not short.hidden and not short.missed and not short.hit
    assert f"{tokens} tokens and no whole chunk of 256" in short.sentence


def test_a_single_chunk_can_be_loaded_but_for_its_last_token() -> None:
    one = replace(PROMPT, tokens=256, loaded=255)
    assert one.hit and not one.under_chunk


def test_the_consumers_own_cache_served_it() -> None:
    own = replace(PROMPT, local=800, loaded=0)
    assert own.hidden and not own.missed and not own.hit
    assert "0 of 768 eligible tokens came from the store, 800 from the consumer's" in own.sentence


def test_a_part_of_each_is_not_a_miss() -> None:
    part = replace(PROMPT, local=256, loaded=512)
    assert part.hit and not part.missed and not part.hidden


def test_missing_tokens_are_a_miss() -> None:
    lost = replace(PROMPT, loaded=256)
    assert lost.missed and not lost.hidden


def test_a_check_fails_where_it_did_not_hit() -> None:
    held = replace(PROMPT, local=800, loaded=0)
    lost = replace(PROMPT, loaded=0)
    for prompt, wrong in ((PROMPT, []), (held, []), (lost, ["your prompt"])):
        found = Findings(stored_keys=1, prompts=[prompt])
        assert [one.item for one in failures(found, (), store_answers=True)] == wrong
