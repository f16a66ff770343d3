"""What the path does in a real stack: first tokens, hits without a gap, the barrier's cost."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.kit import say
from bench.redis_path import page
from bench.redis_path.contender import CHUNK
from bench.redis_path.report import Target, target_table
from bench.redis_path.rounds import PROMPT_BYTES
from bench.redis_path.running_stack import Engine, Running, prompt, running_stack
from bench.redis_path.wide_model import BYTES_A_TOKEN
from deploy.verify.hits import eligible_tokens

# As many whole chunks as come nearest to 172 MiB, and some tokens to compute.
PROMPT_TOKENS = round(PROMPT_BYTES / BYTES_A_TOKEN / CHUNK) * CHUNK + 100
ONE_BY_ONE = 20
WAVES, AT_ONCE = 3, 8
# The barrier's cost is of short prompts, which wait the same for each chunk and are sooner done.
SHORT_TOKENS = 4 * CHUNK + 100
BATCH, IN_FLIGHT = 12, 4

_seeds = itertools.count(1)


@dataclass(frozen=True)
class Found:
    """What was measured; seconds, and shares of 1."""

    prompt_tokens: int
    loaded_s: list[float]
    computed_s: list[float]
    hit_rate_one_by_one: float
    hit_rate_at_once: float
    held_per_s: list[float]
    unheld_per_s: list[float]


def run(rounds: int, *, as_json: bool, results: Path | None) -> None:
    """Measure, and print what was found."""
    with running_stack() as stack:
        found = _measure(stack, rounds)
    targets = judge(found)
    if results:
        results.write_text(page.stack_page(_table(found), targets), encoding="utf-8")
    if as_json:
        print(json.dumps({**asdict(found), "targets": [asdict(t) for t in targets]}))
        return
    print(f"{_table(found)}\n\n{target_table(targets)}")


def _measure(stack: Running, rounds: int) -> Found:
    for engine in (stack.producer, stack.unheld, stack.consumer):
        engine.ask(_prompt())  # warms it up
    stack.drain()
    loaded, computed, one_by_one = _first_tokens(stack, rounds)
    at_once = _at_once(stack)
    # A small difference of two noisy numbers needs more rounds.
    held, unheld = _barrier(stack, 2 * rounds)
    return Found(PROMPT_TOKENS, loaded, computed, one_by_one, at_once, held, unheld)


def _prompt(tokens: int = PROMPT_TOKENS) -> list[int]:
    return prompt(tokens, next(_seeds))


def _first_tokens(stack: Running, rounds: int) -> tuple[list[float], list[float], float]:
    """Ask for prompts right after their prefill; now and then for one that was never stored."""
    loaded, computed = [], []
    before = stack.consumer.hits()
    for number in range(ONE_BY_ONE):
        asked = _prompt()
        stack.producer.ask(asked)
        loaded.append(stack.consumer.ask(asked))
        if number < rounds:
            computed.append(stack.consumer.ask(_prompt()))
        stack.store.flushall()
        say(f"prompt {number + 1} of {ONE_BY_ONE}: first token after {loaded[-1]:.2f} s")
    hits = stack.consumer.hits() - before
    return loaded, computed, hits / (ONE_BY_ONE * eligible_tokens(PROMPT_TOKENS, CHUNK))


def _at_once(stack: Running) -> float:
    before = stack.consumer.hits()

    def ask(asked: list[int]) -> None:
        stack.producer.ask(asked)
        stack.consumer.ask(asked)

    for wave in range(WAVES):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask, [_prompt() for _ in range(AT_ONCE)]))
        stack.drain()
        say(f"{AT_ONCE} at once: {wave + 1} of {WAVES}")
    hits = stack.consumer.hits() - before
    return hits / (WAVES * AT_ONCE * eligible_tokens(PROMPT_TOKENS, CHUNK))


def _barrier(stack: Running, rounds: int) -> tuple[list[float], list[float]]:
    """Return requests a second, with the barrier and without, in turns."""
    rates: dict[str, list[float]] = {"held": [], "unheld": []}
    sides = {"held": stack.producer, "unheld": stack.unheld}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            rate = _rate(sides[name])
            stack.drain()
            if number:  # the first round warms up
                rates[name].append(rate)
        say(f"barrier: round {number} of {rounds}")
    return rates["held"], rates["unheld"]


def _rate(engine: Engine) -> float:
    prompts = [_prompt(SHORT_TOKENS) for _ in range(BATCH)]
    began = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(engine.ask, prompts))
    return BATCH / (time.perf_counter() - began)


def _cost(found: Found) -> list[float]:
    pairs = zip(found.held_per_s, found.unheld_per_s, strict=True)
    return [100 * (1 - held / unheld) for held, unheld in pairs]


def judge(found: Found) -> list[Target]:
    """Return the must-holds that a stack can tell."""
    cost = statistics.median(_cost(found))
    rates = (
        (f"eligible hit rate, no gap, {ONE_BY_ONE} one by one", found.hit_rate_one_by_one),
        (f"eligible hit rate, no gap, {AT_ONCE} at once", found.hit_rate_at_once),
    )
    return [
        *(Target(what, "100 %", f"{100 * rate:.1f} %", rate == 1) for what, rate in rates),
        Target("barrier's cost in producer throughput", "< 5 %", f"{cost:.1f} %", cost < 5),
    ]


def _table(found: Found) -> str:
    def line(what: str, values: Sequence[float], unit: str) -> str:
        middle = statistics.median(values)
        return f"| {what} | {middle:.2f} {unit} | {min(values):.2f} to {max(values):.2f} |"

    ratios = [a / b for a, b in zip(found.computed_s, found.loaded_s, strict=False)]
    return "\n".join([
        f"| prompts of {found.prompt_tokens} tokens | median | lowest to highest |",
        "|---|---|---|",
        line("decode's first token, KV loaded", found.loaded_s, "s"),
        line("decode's first token, all computed", found.computed_s, "s"),
        line("computed / loaded", ratios, ""),
        line("producer with the barrier", found.held_per_s, "requests/s"),
        line("producer without", found.unheld_per_s, "requests/s"),
        line("the barrier's cost", _cost(found), "%"),
    ])  # fmt: skip
