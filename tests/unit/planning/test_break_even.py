"""Where loading KV begins to beat computing it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.planning.break_even import (
    LastBenchmark,
    Speeds,
    break_even_tokens,
    changes,
    needed_gb_s,
)

# Computing a chunk takes 256 ms, loading it 128 ms.
SPEEDS = Speeds(prefill_tokens_s=1000.0, load_gb_s=0.008, lookup_s=0.2, token_bytes=4000, chunk=256)


class TestBreakEven:
    def test_break_even_is_the_first_prompt_that_loads_faster(self) -> None:
        found = break_even_tokens(SPEEDS)
        assert found == 512
        assert SPEEDS.load_s(found) < SPEEDS.compute_s(found)
        before = found - SPEEDS.chunk
        assert SPEEDS.load_s(before) >= SPEEDS.compute_s(before)

    @pytest.mark.parametrize("lookup_s", [0.0, 0.001, 0.05, 0.1, 0.127, 0.3, 2.0, 20.0])
    @pytest.mark.parametrize("chunk", [16, 256])
    def test_break_even_agrees_with_a_search(self, lookup_s: float, chunk: int) -> None:
        speeds = replace(SPEEDS, lookup_s=lookup_s, chunk=chunk)
        lengths = range(chunk, 200_000, chunk)
        searched = next(one for one in lengths if speeds.load_s(one) < speeds.compute_s(one))
        assert break_even_tokens(speeds) == searched

    def test_a_slow_store_has_no_break_even(self) -> None:
        assert SPEEDS.computed_gb_s == pytest.approx(0.004)
        assert break_even_tokens(replace(SPEEDS, load_gb_s=0.004)) is None
        assert break_even_tokens(replace(SPEEDS, load_gb_s=0.0)) is None
        assert break_even_tokens(replace(SPEEDS, load_gb_s=0.0041)) is not None

    def test_less_than_a_chunk_is_computed(self) -> None:
        assert SPEEDS.load_s(255) == pytest.approx(SPEEDS.lookup_s + SPEEDS.compute_s(255))


class TestNeeded:
    @pytest.mark.parametrize("tokens", [256, 700, 2048])
    def test_a_little_more_pays_and_a_little_less_does_not(self, tokens: int) -> None:
        needed = needed_gb_s(SPEEDS, tokens)
        assert needed is not None
        for factor, pays in ((1.001, True), (0.999, False)):
            speeds = replace(SPEEDS, load_gb_s=factor * needed)
            found = break_even_tokens(speeds)
            assert (found is not None and found <= tokens) == pays
        # What was measured of the Redis of now does not matter.
        assert needed_gb_s(replace(SPEEDS, load_gb_s=9.0), tokens) == needed

    def test_of_long_prompts_it_is_what_prefill_computes(self) -> None:
        assert needed_gb_s(SPEEDS, 256_000_000) == pytest.approx(SPEEDS.computed_gb_s, rel=1e-5)

    def test_no_speed_makes_up_for_a_slow_lookup(self) -> None:
        assert needed_gb_s(replace(SPEEDS, lookup_s=0.256), 256) is None
        assert needed_gb_s(replace(SPEEDS, lookup_s=0.255), 256) is not None
        assert needed_gb_s(SPEEDS, 255) is None


def test_the_last_benchmark_says_each_load() -> None:
    def said(**tokens: int | None) -> str:
        return str(LastBenchmark(tokens, "2026-11-22T10:00:00", "/bench/a"))

    assert said(one=256, two=1024) == (
        "measured here on 2026-11-22: loading KV is faster than computing it from 256 tokens on "
        "(one), from 1,024 tokens on (two); /bench/a"
    )
    assert "it from 256 tokens on (one), for no length (two);" in said(one=256, two=None)
    assert "computing KV is faster than loading it for every prompt length, at one and two;" in (
        said(one=None, two=None)
    )


def test_faster_parts_move_the_break_even() -> None:
    moved = {one.what: break_even_tokens(one.speeds) for one in changes(SPEEDS, shards=1)}
    assert list(moved.values()) == [512, 512, 512, None]
    assert next(iter(moved)).startswith("2 shards instead of 1")
