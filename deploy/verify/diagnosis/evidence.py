"""The evidence for the rules, gathered during and after a failed check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.planning.redis_memory import RedisMemory
from deploy.verify.own_prompt import OwnPrompt

# The connector vLLM must load; any other moves no KV, or bypasses the fixes.
CONNECTOR = "PatchedLMCacheConnector"
MP_CONNECTOR = "PatchedLMCacheMPConnector"


@dataclass(frozen=True)
class EngineFacts:
    """One engine as it actually runs.

    Attributes:
        role: producer, consumer or aggregated.
        hash_seed: its PYTHONHASHSEED; "" if unset, None if another host has the engine.
        connector: name in its arguments; "" if they name none, None if unknown.
        use_native: its arguments select vLLM's own copy of LMCache's adapter.
        fixes: fix id → state, as its connector reports; empty without a report.
        kv: what its connector reported about its KV (`kv_report`); empty without a report.
        failures: kind → Redis calls that failed during the check; None if not counted.
        left_out: chunks that it did not store during the check.
        late: answers sent before their KV was stored, during the check.
        said: the last Redis failure of these kinds that it reported.
        ended: it exited during the check.
        restarted: it was restarted meanwhile.
    """

    name: str
    role: str = "consumer"
    hash_seed: str | None = ""
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
        """Whether pdkit's connector moves its KV, as far as known."""
        return self.connector in (None, CONNECTOR, MP_CONNECTOR) and not self.use_native

    @property
    def unknown(self) -> bool:
        """Whether nothing shows its connector: neither its arguments nor its metrics page."""
        return self.connector is None and self.failures is None


@dataclass(frozen=True)
class StoreFacts:
    """Redis during the check; None for what its user may not see.

    Attributes:
        reachable: it answered before and after.
        refusal: its error instead of an answer to pdkit; "" if it answers.
        denied: that error is about authentication.
        restarted: its run id changed since the start of the check.
        flushes, evicted: during the check.
        errors: error code → count during the check, over all clients.
        policy: its maxmemory-policy.
        max_memory_bytes: 0 without a limit.
        user_supplied: it is the user's own, without a log here.
        services: names of pdkit's servers, those that do not answer first.
        name: what it is called.
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
    user_supplied: bool = False
    services: Sequence[str] = ("redis",)
    name: str = "Redis"

    @property
    def memory(self) -> RedisMemory:
        """How much it may hold, and what it does then."""
        return RedisMemory(None, self.max_memory_bytes, self.policy)


@dataclass(frozen=True)
class ServerFacts:
    """LMCache's server, through which engines share KV, during the check.

    Attributes:
        memory_mib: for KV.
        no_room: chunks that it had no memory for.
        evictions: how often it dropped a part of its KV.
        lmcache: the version that it runs; "" if unknown.
        engines: the instances of engines that it knows; None if unknown.
        shm_free_mib: of /dev/shm, where it reaches the engines' KV; None if unknown.
        shm_engine_mib: what an engine's KV takes there.
    """

    name: str
    memory_mib: int
    no_room: int = 0
    evictions: int = 0
    lmcache: str = ""
    engines: Sequence[int] | None = None
    shm_free_mib: int | None = None
    shm_engine_mib: int = 0


@dataclass(frozen=True)
class Evidence:
    """The evidence of one check.

    Attributes:
        stack: its name, for hints.
        server: LMCache's server; None if engines use Redis themselves.
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
        bad_pair: what is known against the engines' versions; "" if nothing is.
        prompts: the user's own prompt, by pair; empty if none was given.
        failures: what the check found wrong, a sentence each.
        stale: what is wrong with KV that an earlier check stored; "" if nothing is.
        emptying: the commands after which engines begin with an empty store.
    """

    stack: str
    engines: Sequence[EngineFacts]
    store: StoreFacts = StoreFacts()
    server: ServerFacts | None = None
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
    stale: str = ""
    emptying: str = ""

    @property
    def names(self) -> list[str]:
        """The names of all engines."""
        return [engine.name for engine in self.engines]

    def calls_failed(self) -> dict[str, Mapping[str, float]]:
        """Return engine → kind → failed calls to Redis; of Redis itself where no engine counts.

        Redis counts its answers to everybody, so that its word is only taken for want of another.
        """
        counted = {e.name: e.failures for e in self.engines if e.failures is not None}
        if not counted and self.store.errors:
            return {"redis": {code.lower(): n for code, n in self.store.errors.items()}}
        return {name: kinds for name, kinds in counted.items() if kinds}

    def kinds_failed(self) -> set[str]:
        """Return the kinds of calls that failed, of any engine."""
        return {kind for kinds in self.calls_failed().values() for kind in kinds}

    def restart_hint(self) -> str:
        """Return the commands that start every engine as planned."""
        return f"deploy down --name {self.stack}; deploy up --name {self.stack}"


def said_by(told: Mapping[str, object]) -> str:
    """Join the answers of services into one line; services with equal answers share an entry."""
    by_value: dict[str, list[str]] = {}
    for name, value in told.items():
        by_value.setdefault(str(value), []).append(name)
    return "; ".join(f"{join(names)} {value}" for value, names in by_value.items())


def join(names: Sequence[str]) -> str:
    """Return names as a list for people."""
    return ", ".join(names)
