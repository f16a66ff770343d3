"""Prompts that are computed and loaded, and what the two answers have in common."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from bench.gpu_proof.session import Stack
from deploy.verify.equivalence import Completion, Noise, compare, self_differences
from deploy.verify.hits import eligible_tokens

CHUNK = 256
# Around two whole chunks: of 512 and 513 tokens one step is left to compute, which engines on GPUs
# take by another way than longer ones.
EDGES = (510, 511, 512, 513, 514, 515)
_POLL_S = 0.001

_seeds = itertools.count(time.time_ns())


def fresh(tokens: int) -> list[int]:
    """Return printable characters, one a token, that no engine has seen."""
    return random.Random(next(_seeds)).choices(range(32, 127), k=tokens)  # noqa: S311 - no secret


@dataclass(frozen=True)
class Crossing:
    """One prompt: computed by the consumer, then prefilled by the producer and loaded.

    Attributes:
        noise: differences in log-probability between the consumer's computed answer and its answer
            from its own prefix cache: how far the next two may be off, as in `deploy check`.
        difference: the largest between the computed and the loaded answer.
        signal: the same to the answer to a prompt with another first half, which is what wrong KV
            looks like.
    """

    tokens: int
    eligible: int
    hits: int
    noise: Noise
    difference: float
    signal: float
    matches: bool
    tells_apart: bool

    @property
    def failures(self) -> list[str]:
        found = []
        if self.hits != self.eligible:
            found.append(f"{self.tokens} tokens: {self.hits} of {self.eligible} loaded")
        for floor in self.noise.contradicting.values():
            found.append(f"{self.tokens} tokens: an engine's own answers differ: {told(floor)}")
        if not self.matches:
            found.append(
                f"{self.tokens} tokens: loaded and computed answers differ: "
                f"{told(self.difference)} (tolerated: {self.noise.tolerance:.2f})"
            )
        if not self.tells_apart:
            found.append(f"{self.tokens} tokens: another prompt's answer looks the same")
        return found

    def row(self) -> dict[str, Any]:
        """Return a line of the page's table."""
        shown = {
            "tolerated": self.noise.tolerance,
            "difference": self.difference,
            "wrong KV": self.signal,
        }
        return {
            "tokens": self.tokens, "eligible": self.eligible, "loaded": self.hits,
            **{name: told(difference) for name, difference in shown.items()},
        }  # fmt: skip


def told(difference: float) -> float | str:
    """Return a difference in log-probability for people: it is infinite between other tokens."""
    return "other tokens" if math.isinf(difference) else round(difference, 3)


def cross(stack: Stack, tokens: int) -> Crossing:
    """Compute a prompt, then load it, and compare."""
    prompt = fresh(tokens)
    stack.forget()
    cold = stack.ask("consumer-0", prompt)
    noise = _noise(cold, stack.ask("consumer-0", prompt))
    half = tokens // 2
    other = stack.ask("consumer-0", fresh(half) + prompt[half:])
    stack.forget()
    stack.ask("producer-0", prompt, 1)
    before = stack.counters("consumer-0").external_hits
    loaded = stack.ask("consumer-0", prompt)
    hits = int(stack.counters("consumer-0").external_hits - before)
    found = compare(cold, loaded, tolerance=noise.tolerance)
    wrong = compare(cold, other, tolerance=noise.tolerance)
    return Crossing(
        tokens=tokens,
        eligible=eligible_tokens(tokens, CHUNK),
        hits=hits,
        noise=noise,
        difference=found.max_logprob_diff,
        signal=wrong.max_logprob_diff,
        matches=found.matches,
        tells_apart=not wrong.matches,
    )


def _noise(computed: Completion, cached: Completion) -> Noise:
    return Noise({"consumer-0": self_differences(computed, cached)})


def rates(stack: Stack, tokens: int, rounds: int) -> dict[str, float]:
    """Measure first tokens, computed against loaded, and how fast KV moved meanwhile."""
    computed, loaded = [], []
    stack.timed("consumer-0", fresh(tokens))  # warms it up
    stored, read = stack.store_path("producer-0"), stack.store_path("consumer-0")
    for _ in range(rounds):
        prompt = fresh(tokens)
        computed.append(stack.timed("consumer-0", fresh(tokens)))
        stack.ask("producer-0", prompt, 1)
        loaded.append(stack.timed("consumer-0", prompt))
    stored = stack.store_path("producer-0").since(stored)
    read = stack.store_path("consumer-0").since(read)
    pairs = zip(computed, loaded, strict=True)
    return {
        "prompt, tokens": tokens,
        "rounds": rounds,
        "first token computed, s": round(statistics.median(computed), 4),
        "first token loaded, s": round(statistics.median(loaded), 4),
        "computed / loaded": round(statistics.median(c / done for c, done in pairs), 2),
        "stored by one connection, GB/s": round(stored.store_gb_s, 3),
        "loaded, GB/s": round(read.load_gb_s, 3),
        "chunks loaded": read.loaded_chunks,
        "chunks not loaded": read.not_loaded + read.refused,
    }


def tier_rates(stack: Stack, tokens: int, rounds: int) -> dict[str, float]:
    """Measure first tokens: computed, from the memory of LMCache's server, and from Redis alone."""
    eligible = eligible_tokens(tokens, CHUNK)
    found: dict[str, list[float]] = {"computed": [], "from memory": [], "from Redis": []}
    stack.timed("consumer-0", fresh(tokens))  # warms it up
    before = stack.counters("consumer-0").external_hits
    for _ in range(rounds):
        found["computed"].append(stack.timed("consumer-0", fresh(tokens)))
        for tier in ("from memory", "from Redis"):
            prompt = fresh(tokens)
            stack.ask("producer-0", prompt, 1)
            if tier == "from Redis":
                stack.drop_from_memory(prompt)
            found[tier].append(stack.timed("consumer-0", prompt))
    hits = stack.counters("consumer-0").external_hits - before
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {
        "prompt, tokens": tokens,
        "rounds": rounds,
        **{f"first token {name}, s": round(took, 4) for name, took in medians.items()},
        "computed / from memory": round(medians["computed"] / medians["from memory"], 2),
        "computed / from Redis": round(medians["computed"] / medians["from Redis"], 2),
        "tokens not loaded": 2 * rounds * eligible - int(hits),
    }


@dataclass(frozen=True)
class Killed:
    """A prompt whose KV was there, in chunks, when what had it died."""

    matches: bool
    not_loaded: float
    difference: float


def kill_redis_before_load(stack: Stack, tokens: int) -> Killed:
    """Kill Redis once it was asked for chunks that it had said to have; compare the answer.

    Redis closes every connection that a value is to go out by, so that none arrives before it dies,
    however slow this process is.
    """
    prompt, reference, noise = _stored(stack, tokens)
    before = stack.store_path("consumer-0")
    stores = stack.stores()
    for store in stores:
        store.config_set("client-output-buffer-limit", f"normal {1 << 14} 0 0")
        store.config_resetstat()
    killer = threading.Thread(target=_kill_once_read, args=(stack, stores))
    killer.start()
    answer = stack.ask("consumer-0", prompt)
    killer.join()
    found = compare(reference, answer, tolerance=noise.tolerance)
    moved = stack.store_path("consumer-0").since(before)
    return Killed(found.matches, moved.not_loaded, found.max_logprob_diff)


def _stored(stack: Stack, tokens: int) -> tuple[list[int], Completion, Noise]:
    """Store a fresh prompt's KV; return the prompt, its computed answer, and the engine's noise."""
    prompt = fresh(tokens)
    stack.forget()
    reference = stack.ask("consumer-0", prompt)
    noise = _noise(reference, stack.ask("consumer-0", prompt))
    stack.forget()
    stack.ask("producer-0", prompt, 1)
    return prompt, reference, noise


def _kill_once_read(stack: Stack, stores: Sequence[redis.Redis]) -> None:
    """Wait for the first read of a value, two minutes at most, and kill Redis."""
    until = time.monotonic() + 120
    while time.monotonic() < until and not any(map(_was_read, stores)):
        time.sleep(_POLL_S)
    stack.kill("redis")


def kill_server_before_load(stack: Stack, tokens: int) -> Killed:
    """Kill LMCache's server when it has a prompt, ask for it, and compare the answer."""
    prompt, reference, noise = _stored(stack, tokens)
    before = stack.counters("consumer-0").external_hits
    stack.kill("kv-server")
    answer = stack.ask("consumer-0", prompt)
    lost = eligible_tokens(tokens, CHUNK) - (stack.counters("consumer-0").external_hits - before)
    found = compare(reference, answer, tolerance=noise.tolerance)
    return Killed(found.matches, lost / CHUNK, found.max_logprob_diff)


def _was_read(store: redis.Redis) -> bool:
    return "cmdstat_getrange" in store.info("commandstats")
