"""What is sent: random prompts, shared prefixes, conversations, a dataset, or a trace.

The seed settles lengths, arrivals and which prompts share a prefix. The tokens themselves are new
in every pass: caches would answer what they were sent before.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deploy.benchmark.results import Workload
from deploy.errors import UsageError

WorkloadName = Literal["random", "shared-prefix", "multi-turn", "dataset", "trace"]
NAMES: tuple[WorkloadName, ...] = ("random", "shared-prefix", "multi-turn", "dataset", "trace")
FILE_WORKLOADS = ("dataset", "trace")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_MARK_TOKENS = 8
BLOCK_TOKENS = 512  # of a trace's blocks
ChatMessage = dict[str, Any]
Prompt = tuple[int, ...] | str | list[ChatMessage]


@dataclass(frozen=True)
class TokenRange:
    """A number of tokens, or a range from which each request draws one."""

    low: int
    high: int

    @classmethod
    def parse(cls, option: str, text: str) -> TokenRange:
        """Return the span of `512` or `256-1024`.

        Raises:
            UsageError: it is neither, or holds nothing.
        """
        found = _SPAN.fullmatch(text)
        low = int(found[1]) if found else 0
        high = int(found[2] or low) if found else 0
        if not 1 <= low <= high:
            raise UsageError(
                f"{option} {text}: expected a number above 0, or a range such as 256-1024",
                hint=f"deploy bench {option} 512",
            )
        return cls(low, high)

    def draw(self, chance: random.Random) -> int:
        """Return a length between both ends, each as likely as any other."""
        return chance.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def known_workload(name: str) -> WorkloadName:
    """Return a workload's name.

    Raises:
        UsageError: there is no such workload.
    """
    for known in NAMES:
        if name == known:
            return known
    raise UsageError(
        f"--workload {name}: unknown workload; workloads: {', '.join(NAMES)}",
        hint=f"deploy bench --workload {NAMES[0]}",
    )


@dataclass(frozen=True)
class WorkloadOptions:
    """A requested workload.

    Attributes:
        input_tokens: of a prompt; after a shared prefix, or in each turn, of what is new.
        prefix_tokens, prefixes: length and number of the prefixes that prompts share.
        file: of a dataset or a trace.
        speed: how much faster than recorded a trace is sent.
        skip_broken: leave out lines of the file that cannot be used.
        as_is: send a dataset's prompts without a mark that makes them new to the caches.
    """

    name: WorkloadName = "random"
    input_tokens: TokenRange = TokenRange(512, 512)
    output_tokens: TokenRange = TokenRange(32, 32)
    prefix_tokens: int = 512
    prefixes: int = 4
    turns: int = 4
    file: Path | None = None
    speed: float = 1.0
    skip_broken: bool = False
    as_is: bool = False

    def described(self, *, skipped_lines: int = 0) -> Workload:
        """Return the parameters that matter for this workload, as a result keeps them."""
        used = {
            "random": ("input_tokens", "output_tokens"),
            "shared-prefix": ("input_tokens", "output_tokens", "prefix_tokens", "prefixes"),
            "multi-turn": ("input_tokens", "output_tokens", "prefix_tokens", "prefixes", "turns"),
            "dataset": ("output_tokens", "as_is"),
            "trace": ("speed",),
        }[self.name]
        facts: dict[str, Any] = {name: _plain(getattr(self, name)) for name in used}
        if self.file is not None:
            facts |= {"file": self.file.name, "skipped_lines": skipped_lines}
        return Workload(name=self.name, **facts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer; 0 if a file settles that."""
        one = self.input_tokens.high + self.output_tokens.high
        if self.name in FILE_WORKLOADS:
            return 0
        prefix = 0 if self.name == "random" else self.prefix_tokens
        return prefix + one * (self.turns if self.name == "multi-turn" else 1)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, TokenRange) else value


@dataclass(frozen=True)
class Turn:
    """One request: what it adds to what was said before, and how long its answer is."""

    added: Prompt
    output_tokens: int

    def after(self, said: tuple[int, ...]) -> Prompt:
        """Return the whole prompt: tokens are appended to `said`, a text is used unchanged."""
        return (*said, *self.added) if isinstance(self.added, tuple) else self.added


@dataclass(frozen=True)
class Conversation:
    """Requests that follow each other; mostly a single one.

    Attributes:
        first_request: the number of its first request in the pass.
        start_s: when it is sent in an open loop, after the pass's start.
    """

    index: int
    first_request: int
    turns: tuple[Turn, ...]
    start_s: float = 0.0


@dataclass(frozen=True)
class Line:
    """A usable line of a dataset or a trace.

    Attributes:
        prompt: None if only its length is known.
        blocks: of a trace, names of the prompt's blocks; equal ones hold the same tokens.
    """

    prompt: Prompt | None
    input_tokens: int
    output_tokens: int | None
    start_s: float = 0.0
    blocks: tuple[int, ...] = ()


class PassSource:
    """Makes the passes of a workload.

    Args:
        tokens: ids that a prompt may consist of.
        lines: of the file, where the workload has one.
    """

    def __init__(
        self, options: WorkloadOptions, tokens: Sequence[int], lines: Sequence[Line] = ()
    ) -> None:
        self._options, self._tokens, self._lines = options, tokens, lines
        # Not of the seed: a cache may still hold what an earlier pass sent.
        self._contents = random.Random()  # noqa: S311 - no secret

    def requests(self, wanted: int) -> int:
        """Return the number of requests of a pass: the wanted number, or fewer if the file ends."""
        if self._lines:
            return min(wanted, len(self._lines))
        turns = self._options.turns if self._options.name == "multi-turn" else 1
        return -(-wanted // turns) * turns

    def one_pass(self, requests: int, *, seed: str, rate: float | None) -> list[Conversation]:
        """Return the conversations of a pass, with seeded Poisson arrivals if there is a rate."""
        chance = random.Random(seed)  # noqa: S311 - no secret
        made = self._turns(self.requests(requests), chance)
        starts = random.Random(f"{seed} arrivals")  # noqa: S311 - no secret
        conversations: list[Conversation] = []
        first, start_s = 0, 0.0
        for index, turns in enumerate(made):
            conversations.append(Conversation(index, first, turns, start_s))
            first += len(turns)
            if rate:
                start_s += starts.expovariate(rate / len(turns))
        if self._options.name == "trace" and rate is None:
            return self._timed(conversations)
        return conversations

    def _timed(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        began = self._lines[0].start_s
        return [
            replace(one, start_s=(line.start_s - began) / self._options.speed)
            for one, line in zip(conversations, self._lines, strict=False)
        ]

    def _turns(self, requests: int, chance: random.Random) -> list[tuple[Turn, ...]]:
        if self._lines:
            return self._of_file(requests, chance)
        options = self._options
        count = requests // (options.turns if options.name == "multi-turn" else 1)
        prefixes = [self._fresh(options.prefix_tokens) for _ in range(options.prefixes)]
        made = []
        for _ in range(count):
            prefix = () if options.name == "random" else chance.choice(prefixes)
            turns = []
            for turn in range(options.turns if options.name == "multi-turn" else 1):
                new = self._fresh(options.input_tokens.draw(chance))
                added = new if turn else (*prefix, *new)
                turns.append(Turn(added, options.output_tokens.draw(chance)))
            made.append(tuple(turns))
        return made

    def _of_file(self, requests: int, chance: random.Random) -> list[tuple[Turn, ...]]:
        """Return a trace's first requests, or those of a dataset's lines drawn by chance."""
        drawn: Sequence[Line] = self._lines[:requests]
        if self._options.name == "dataset" and requests < len(self._lines):
            drawn = chance.sample(self._lines, requests)
        mark = "" if self._options.as_is else f"[{secrets.token_hex(4)}] "
        ids = () if self._options.as_is else self._fresh(_MARK_TOKENS)
        blocks: dict[int, tuple[int, ...]] = {}
        default = self._options.output_tokens.high
        return [
            (
                Turn(
                    self._blocks(line, blocks)
                    if line.prompt is None
                    else _marked(line.prompt, mark, ids),
                    line.output_tokens or default,
                ),
            )
            for line in drawn
        ]

    def _blocks(self, line: Line, known: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Return a trace's prompt: the same tokens for the same block, new ones without any."""
        if not line.blocks:
            return self._fresh(line.input_tokens)
        for block in set(line.blocks) - known.keys():
            known[block] = self._fresh(BLOCK_TOKENS)
        whole = (token for block in line.blocks for token in known[block])
        return tuple(whole)[: line.input_tokens]

    def _fresh(self, count: int) -> tuple[int, ...]:
        return tuple(self._contents.choices(self._tokens, k=count))


def _marked(prompt: Prompt, mark: str, ids: tuple[int, ...]) -> Prompt:
    """Return a prompt that begins with something new, so that no cache holds it."""
    if isinstance(prompt, str):
        return mark + prompt
    if isinstance(prompt, tuple):
        return (*ids, *prompt)
    first, *rest = prompt
    content = first["content"]
    return [{**first, "content": mark + content if isinstance(content, str) else content}, *rest]
