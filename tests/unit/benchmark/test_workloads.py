"""Workloads: what the seed settles, what is new in each pass, and what files may hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.benchmark.dataset import left_out, read_lines
from deploy.benchmark.workloads import Conversation, PassSource, TokenRange, WorkloadOptions
from deploy.errors import UsageError

TOKENS = range(1000, 2000)
CONTEXT = 4096


def one_pass(
    options: WorkloadOptions, requests: int = 20, *, seed: str = "0", rate: float | None = None
) -> list[Conversation]:
    lines = read_lines(options, CONTEXT)[0] if options.file else ()
    return PassSource(options, TOKENS, lines).one_pass(requests, seed=seed, rate=rate)


def prompts(conversations: list[Conversation]) -> list[Any]:
    return [turn.added for one in conversations for turn in one.turns]


def file_of(folder: Path, *lines: object) -> Path:
    file = folder / "lines.jsonl"
    file.write_text(
        "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines) + "\n",
        encoding="utf-8",
    )
    return file


class TestSpan:
    def test_a_number_or_a_range_is_read(self) -> None:
        assert TokenRange.parse("--input-tokens", "512") == TokenRange(512, 512)
        assert str(TokenRange.parse("--input-tokens", "256-1024")) == "256-1024"

    @pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "many", "1-2-3", "0-4"])
    def test_anything_else_is_one_clear_error(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"--input-tokens .*: expected a number above 0"):
            TokenRange.parse("--input-tokens", text)


class TestRandom:
    options = WorkloadOptions(input_tokens=TokenRange(10, 90), output_tokens=TokenRange(1, 9))

    def test_the_seed_decides_lengths_and_arrivals_but_not_the_tokens(self) -> None:
        def shape(made: list[Conversation]) -> list[Any]:
            return [(len(t.added), t.output_tokens, c.start_s) for c in made for t in c.turns]

        one, same, other = (one_pass(self.options, seed=s, rate=2.0) for s in ("1", "1", "2"))
        assert shape(one) == shape(same) != shape(other)
        assert not set(prompts(one)) & set(prompts(same))

    def test_lengths_stay_in_their_range(self) -> None:
        lengths = {len(prompt) for prompt in prompts(one_pass(self.options, 300))}
        assert min(lengths) >= 10
        assert max(lengths) <= 90
        assert len(lengths) > 20

    def test_arrivals_have_the_rate(self) -> None:
        made = one_pass(self.options, 2000, rate=5.0)
        assert made[-1].start_s == pytest.approx(2000 / 5, rel=0.1)

    def test_same_seed_stretches_the_same_arrivals(self) -> None:
        slow, fast = (one_pass(self.options, rate=rate) for rate in (1.0, 4.0))
        assert [one.start_s for one in slow] == pytest.approx([4 * one.start_s for one in fast])


def test_prompts_share_the_given_number_of_prefixes() -> None:
    options = WorkloadOptions("shared-prefix", prefix_tokens=50, prefixes=3)
    begins = {prompt[:50] for prompt in prompts(one_pass(options, 40))}
    assert len(begins) == 3
    assert len(set(prompts(one_pass(options, 40)))) == 40


class TestMultiTurn:
    options = WorkloadOptions(
        "multi-turn", prefix_tokens=50, prefixes=1, turns=3, input_tokens=TokenRange(10, 10)
    )

    def test_only_the_first_turn_has_the_prefix(self) -> None:
        first = one_pass(self.options, 9)[0]
        assert [len(turn.added) for turn in first.turns] == [60, 10, 10]

    def test_requests_are_whole_conversations(self) -> None:
        made = one_pass(self.options, 7)
        assert sum(len(one.turns) for one in made) == 9
        assert [one.first_request for one in made] == [0, 3, 6]

    def test_rate_is_of_requests(self) -> None:
        made = one_pass(self.options, 3000, rate=5.0)
        assert made[-1].start_s == pytest.approx(3000 / 5, rel=0.1)

    def test_longest_counts_every_turn(self) -> None:
        assert self.options.longest == 50 + 3 * (10 + 32)


class TestDataset:
    def made(self, folder: Path, *lines: object, **options: Any) -> list[Conversation]:
        return one_pass(WorkloadOptions("dataset", file=file_of(folder, *lines), **options))

    def test_text_token_ids_and_messages_are_read(self, tmp_path: Path) -> None:
        talk = [{"role": "user", "content": "Hi"}]
        found = self.made(
            tmp_path,
            {"prompt": "Hello", "output_tokens": 5},
            {"prompt": [1, 2]},
            {"messages": talk},
            as_is=True,
        )
        assert prompts(found) == ["Hello", (1, 2), talk]
        assert [one.turns[0].output_tokens for one in found] == [5, 32, 32]

    def test_a_part_is_drawn_by_the_seed(self, tmp_path: Path) -> None:
        lines = [{"prompt": [number]} for number in range(1, 101)]
        options = WorkloadOptions("dataset", file=file_of(tmp_path, *lines), as_is=True)
        source = PassSource(options, TOKENS, read_lines(options, CONTEXT)[0])
        drawn, again, other = (
            prompts(source.one_pass(10, seed=seed, rate=None)) for seed in ("1", "1", "2")
        )
        assert drawn == again != other
        assert len(set(drawn)) == 10
        assert max(drawn) > (10,), "not the first ones"
        every = prompts(source.one_pass(100, seed="1", rate=None))
        assert every == [(number,) for number in range(1, 101)]

    def test_prompts_are_new_to_the_caches(self, tmp_path: Path) -> None:
        lines = (
            {"prompt": "Hello"},
            {"prompt": [1, 2]},
            {"messages": [{"role": "a", "content": ""}]},
        )
        text, ids, messages = prompts(self.made(tmp_path, *lines))
        again = prompts(self.made(tmp_path, *lines))
        assert text.endswith("] Hello")
        assert ids[-2:] == (1, 2)
        assert len(ids) == 10
        assert messages[0]["content"].startswith("[")
        assert not [
            one for one, other in zip((text, ids, messages), again, strict=True) if one == other
        ]

    def test_broken_lines_are_named(self, tmp_path: Path) -> None:
        lines = [{"prompt": "ok"}, "{", "[]", {"text": "x"}, {"prompt": "x", "output_tokens": 0}]
        with pytest.raises(UsageError) as caught:
            self.made(tmp_path, *lines)
        assert "4 of 5 lines cannot be used: line 2: not JSON; line 3: " in caught.value.message
        assert caught.value.message.endswith("; and 1 more")
        assert "--skip-broken" in caught.value.hint
        options = WorkloadOptions("dataset", file=file_of(tmp_path, *lines), skip_broken=True)
        assert read_lines(options, CONTEXT)[1] == [2, 3, 4, 5]
        assert options.described(skipped_lines=4).model_dump()["skipped_lines"] == 4

    @pytest.mark.parametrize(
        ("numbers", "words"),
        [
            ([7], "1 line of a.jsonl left out: 7"),
            (range(1, 11), "10 lines of a.jsonl left out: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
            (
                range(1, 14),
                "13 lines of a.jsonl left out: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more",
            ),
        ],
    )
    def test_skipped_lines_are_numbered(self, numbers: Sequence[int], words: str) -> None:
        assert left_out(Path("a.jsonl"), numbers) == words

    def test_a_line_ends_where_json_lines_end(self, tmp_path: Path) -> None:
        line = '{"prompt": "a\u2028b"}'
        found = self.made(tmp_path, "\ufeff" + line, line + "\r", as_is=True)
        assert prompts(found) == ["a\u2028b"] * 2

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ({"prompt": ""}, "neither text nor token ids"),
            ({"prompt": [1, "a"]}, "neither text nor token ids"),
            ({"prompt": [True]}, "neither text nor token ids"),
            ({"messages": []}, "not a list of messages"),
            ({"messages": [{"role": "user"}]}, "not a list of messages"),
            ({"prompt": [1] * CONTEXT}, "do not fit the model's context of 4096"),
        ],
    )
    def test_invalid_lines_are_refused_with_the_reason(
        self, tmp_path: Path, line: object, why: str
    ) -> None:
        with pytest.raises(UsageError, match=why):
            self.made(tmp_path, {"prompt": "ok"}, line)

    def test_deeply_nested_json_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="line 2: not JSON"):
            self.made(tmp_path, {"prompt": "ok"}, "[" * 100_000)

    def test_nothing_usable_is_an_error_even_when_skipping(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="1 of 1 lines cannot be used"):
            self.made(tmp_path, "{", skip_broken=True)
        with pytest.raises(UsageError, match="no lines"):
            self.made(tmp_path, "", skip_broken=True)

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            one_pass(WorkloadOptions("dataset", file=tmp_path / "none"))
        with pytest.raises(UsageError, match="--workload trace needs a file"):
            read_lines(WorkloadOptions("trace"), CONTEXT)


class TestTrace:
    lines = (
        {"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [1, 3]},
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 30, "output_length": 6},
    )

    def test_times_lengths_and_shared_blocks_are_read(self, tmp_path: Path) -> None:
        options = WorkloadOptions("trace", file=file_of(tmp_path, *self.lines), speed=2.0)
        made = one_pass(options)
        assert [one.start_s for one in made] == [0, 0.25, 1.0]
        assert [len(prompt) for prompt in prompts(made)] == [600, 30, 700]
        assert [one.turns[0].output_tokens for one in made] == [5, 6, 4]
        first, _, last = prompts(made)
        assert first[:512] == last[:512]
        assert first[512:] != last[512:600]

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"timestamp": "now"}, "'timestamp' is not a number"),
            ({"timestamp": -1}, "'timestamp' is not a number"),
            ({"timestamp": float("nan")}, "'timestamp' is not a number"),
            ({"timestamp": float("inf")}, "'timestamp' is not a number"),
            ({"timestamp": 10**400}, "'timestamp' is not a number"),
            ({"input_length": 0}, "'input_length' is not a number above 0"),
            ({"output_length": None}, "'output_length' is not a number above 0"),
            ({"hash_ids": ["a"]}, "'hash_ids' is not a list of numbers"),
            ({"hash_ids": [1]}, "1 'hash_ids' of 512 tokens are too few"),
            ({"input_length": 5000, "hash_ids": []}, "do not fit the model's context"),
        ],
    )
    def test_an_invalid_line_is_refused_with_the_reason(
        self, tmp_path: Path, changed: dict[str, Any], why: str
    ) -> None:
        options = WorkloadOptions("trace", file=file_of(tmp_path, {**self.lines[0], **changed}))
        with pytest.raises(UsageError, match=why):
            one_pass(options)
