"""What the rules look at, gathered while a check ran and when it had failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.verify.own_prompt import OwnPrompt

# What vLLM is told to load; everything else moves no KV, or moves it past the fixes.
CONNECTOR = "PatchedLMCacheConnector"


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as it really runs.

    Attributes:
        role: producer or consumer.
        hash_seed: its PYTHONHASHSEED; "" where it has none.
        connector: the name that its arguments give vLLM; "" where they name none, None where nobody
            tells.
        use_native: its arguments ask for vLLM's own copy of LMCache's adapter.
        fixes: fix id → state, as its connector reported at start; empty where it did not.
        kv: what its connector said that KV means in it (`kv_report`); empty where it did not.
        failures: kind → calls that Redis failed during the check; None where nobody counts them.
        left_out: chunks that it did not store during the check.
        late: answers that left before their KV was stored, during the check.
        said: what its log says last of a failure of Redis.
        ended: it did not live through the check.
        restarted: it was started anew meanwhile.
    """

    name: str
    role: str = "consumer"
    hash_seed: str = ""
    connector: str | None = CONNECTOR
    use_native: bool = False
    fixes: Mapping[str, str] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, float] | None = None
    left_out: float = 0
    late: float = 0
    said: str = ""
    ended: bool = False
    restarted: bool = False

    @property
    def patched(self) -> bool:
        """Whether the kit's connector moves its KV, as far as anybody tells."""
        return self.connector in (None, CONNECTOR) and not self.use_native

    @property
    def unknown(self) -> bool:
        """Nothing but its log, which may have lost its beginning, could tell of its connector."""
        return self.connector is None and self.failures is None


@dataclass(frozen=True)
class StoreFacts:
    """Redis during the check; None is what it does not tell its user.

    Attributes:
        reachable: it answered before and after.
        refusal: what it says to the kit instead of serving; "" where it serves.
        denied: it says that to whom it does not know.
        restarted: it has another run id than at the start of the check.
        flushes, evicted: during the check.
        errors: error code → how often it answered with it during the check, to anybody.
        policy: what it does when it is full.
        max_memory_bytes: 0 where there is no limit.
        brought: it is the user's own, and has no log here.
        services: names of the kit's own, those first that do not answer.
    """

    reachable: bool = True
    refusal: str = ""
    denied: bool = False
    restarted: bool = False
    flushes: int = 0
    evicted: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    policy: str | None = None
    max_memory_bytes: int | None = None
    brought: bool = False
    services: Sequence[str] = ("redis",)


@dataclass(frozen=True)
class Evidence:
    """All that the rules look at.

    Attributes:
        stack: its name, for hints.
        chunk_size: tokens of a chunk, as planned.
        stored_chunks, expected_chunks: chunks seen to arrive in Redis, and those prompts held.
        vanished: keys that had arrived and were gone when their chunks were not found.
        failed_requests: service → what it answered.
        missed: some eligible tokens were not loaded.
        mismatched: some answers differ.
        contradicting: engines whose own prefix caches change their answers.
        bypassed: the router sent prompts to no producer.
        too_short: why no prompt can have a whole chunk.
        refused: values in Redis that were not what was stored.
        not_loaded: chunks that were found and could not be had.
        disabled_by_spec: fixes are switched off by the stack's own settings, and no shell's.
        bad_pair: what is known against the engines' versions; "" where nothing is.
        prompts: the user's own prompt, by pair; empty where none was given.
        failures: what the check found wrong, a sentence each.
    """

    stack: str
    engines: Sequence[EngineFacts]
    store: StoreFacts = StoreFacts()
    chunk_size: int = 0
    stored_chunks: int = 0
    expected_chunks: int = 0
    vanished: int = 0
    failed_requests: Mapping[str, str] = field(default_factory=dict)
    missed: bool = False
    mismatched: bool = False
    contradicting: Sequence[str] = ()
    bypassed: bool = False
    too_short: str = ""
    refused: float = 0
    not_loaded: float = 0
    disabled_by_spec: bool = False
    bad_pair: str = ""
    prompts: Sequence[OwnPrompt] = ()
    failures: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return [engine.name for engine in self.engines]

    def calls_failed(self) -> dict[str, Mapping[str, float]]:
        """Return engine → kind → calls that Redis failed; of Redis itself where no engine counts.

        Redis counts its answers to everybody, so that its word is only taken for want of another.
        """
        counted = {e.name: e.failures for e in self.engines if e.failures is not None}
        if not counted and self.store.errors:
            return {"redis": {code.lower(): n for code, n in self.store.errors.items()}}
        return {name: kinds for name, kinds in counted.items() if kinds}

    def kinds_failed(self) -> set[str]:
        return {kind for kinds in self.calls_failed().values() for kind in kinds}

    def restart_hint(self) -> str:
        """Return what starts every engine as it was planned."""
        return f"deploy down --name {self.stack}; deploy up --name {self.stack}"


def join(names: Sequence[str]) -> str:
    return ", ".join(names)
