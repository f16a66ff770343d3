"""From which prompt length loading KV is faster than computing it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Speeds:
    """The speeds and sizes that decide it, measured or estimated.

    Attributes:
        prefill_tokens_s: tokens that one engine computes in a second, for one request.
        load_gb_s: from the store into an engine.
        lookup_s: how long a lookup in the store takes.
        token_bytes: KV of one token, all ranks together.
        chunk: tokens that share one key. Only whole chunks are loaded.
    """

    prefill_tokens_s: float
    load_gb_s: float
    lookup_s: float
    token_bytes: int
    chunk: int

    @property
    def computed_gb_s(self) -> float:
        """KV that prefill computes per second; loading pays only if the store is faster."""
        return self.prefill_tokens_s * self.token_bytes / 1e9

    def compute_s(self, tokens: int) -> float:
        """Return the seconds that prefill of `tokens` takes."""
        return tokens / self.prefill_tokens_s

    def load_s(self, tokens: int) -> float:
        """Return the seconds until a prompt's KV is ready: whole chunks loaded, the rest
        computed."""
        loaded = tokens // self.chunk * self.chunk
        moved = self.lookup_s + loaded * self.token_bytes / (self.load_gb_s * 1e9)
        return moved + self.compute_s(tokens - loaded)


@dataclass(frozen=True)
class LastBenchmark:
    """What the last benchmark of a model on a machine measured.

    Attributes:
        tokens: load, in words → the shortest prompt whose KV is loaded faster than computed; None
            if none is.
        at: when, ISO 8601.
        result: the folder of the benchmark's result.
    """

    tokens: Mapping[str, int | None]
    at: str
    result: str

    @property
    def pays(self) -> bool:
        """Whether loading KV is faster than computing it, for some length at some load."""
        return any(self.tokens.values())

    def __str__(self) -> str:
        day = self.at.partition("T")[0]
        if not self.pays:
            loads = " and ".join(self.tokens)
            compared = f"computing KV is faster than loading it for every prompt length, at {loads}"
        else:
            compared = "loading KV is faster than computing it " + ", ".join(
                f"{f'from {tokens:,} tokens on' if tokens else 'for no length'} ({load})"
                for load, tokens in self.tokens.items()
            )
        return f"measured here on {day}: {compared}; {self.result}"


@dataclass(frozen=True)
class Change:
    """The speeds, with one of them changed.

    Attributes:
        what: the change, in words.
    """

    what: str
    speeds: Speeds


def break_even_tokens(speeds: Speeds) -> int | None:
    """Return the shortest prompt whose KV is loaded faster than computed, a multiple of the chunk.

    None if loading is slower for every length. Compute time is assumed to be proportional to the
    length. Long prompts cost more than that, so loading may pay off sooner.
    """
    if speeds.load_gb_s <= 0:
        return None
    gain_s = 1 / speeds.prefill_tokens_s - speeds.token_bytes / (speeds.load_gb_s * 1e9)
    if gain_s <= 0:
        return None
    chunks = math.floor(speeds.lookup_s / gain_s / speeds.chunk) + 1
    return chunks * speeds.chunk


def needed_gb_s(speeds: Speeds, tokens: int) -> float | None:
    """Return the store's speed at which loading a prompt takes as long as computing it.

    For very long prompts that is `computed_gb_s`. None if the lookup alone takes as long, or there
    is no whole chunk to load.
    """
    loaded = tokens // speeds.chunk * speeds.chunk
    left_s = speeds.compute_s(loaded) - speeds.lookup_s
    return loaded * speeds.token_bytes / left_s / 1e9 if loaded and left_s > 0 else None


def changes(speeds: Speeds, shards: int) -> list[Change]:
    """Return changes that would move the break-even: estimates, not measurements."""
    return [
        Change(
            f"{2 * shards} shards instead of {shards}, if Redis is the limit",
            replace(speeds, load_gb_s=2 * speeds.load_gb_s),
        ),
        Change(
            f"chunks of {speeds.chunk // 2} tokens instead of {speeds.chunk}",
            replace(speeds, chunk=max(1, speeds.chunk // 2)),
        ),
        Change(
            "half the bytes of KV per token, as FP8 instead of 16 bits",
            replace(speeds, token_bytes=max(1, speeds.token_bytes // 2)),
        ),
        Change(
            "prefill twice as fast, as on another GPU",
            replace(speeds, prefill_tokens_s=2 * speeds.prefill_tokens_s),
        ),
    ]
