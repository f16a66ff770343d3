"""Where loading KV begins to beat computing it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.planning.break_even import Speeds, break_even_tokens, changes

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


def test_faster_parts_move_the_break_even() -> None:
    moved = {one.what: break_even_tokens(one.speeds) for one in changes(SPEEDS, shards=1)}
    assert list(moved.values()) == [512, 512, 512, None]
    assert next(iter(moved)).startswith("2 shards instead of 1")
