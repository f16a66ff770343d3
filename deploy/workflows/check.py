"""`deploy check`: prove on the running stack that KV crosses, and that it is right."""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from deploy.errors import StackUnhealthy
from deploy.runtime.engine_api import ApiError, CacheCounters, EngineApi
from deploy.runtime.home import Home
from deploy.runtime.logs import matches
from deploy.runtime.store import Store, StoreStats
from deploy.stack.service import Service
from deploy.verify.diagnosis import Evidence, diagnose
from deploy.verify.eligible import eligible_tokens
from deploy.verify.equivalence import Answer, compare
from deploy.verify.report import (
    CheckReport,
    EngineHealth,
    Equivalence,
    Hits,
    PairResult,
    StoreUse,
)
from deploy.workflows.prepare import Report
from deploy.workflows.running import (
    RunningStack,
    require_running,
    require_stack,
    service_is_ready,
    store_of,
)

# Tokens that each answer has. With 16, every misplaced chunk, layer or head that was tried on the
# tiny model moved a log-probability past the tolerance (scripts/tiny_model_power.py).
_ANSWER_TOKENS = 16
_ROUTER_PROMPTS = 2
_ANSWER_DEADLINE_S = 10.0
_STORE_DEADLINE_S = 5.0
_NEXT_STORE_DEADLINE_S = 0.5  # once chunks were waited for in vain
_COUNTER_DEADLINE_S = 2.0
_POLL_S = 0.02
_FIX_LINE = r"pdkit-connector fix=(?P<fix>\S+) state=(?P<state>\S+)"


def check_stack(home: Home, name: str, report: Report) -> CheckReport:
    """Check a running stack.

    Raises:
        StateError: there is no such stack.
        StackUnhealthy: a service of it does not run or does not answer, so nothing can be checked.
    """
    running = require_stack(home, name)
    require_running(running)
    _require_answers(running)
    try:
        with _Check(running, report) as check:
            return check.run()
    except ApiError as exc:
        raise StackUnhealthy(
            f"the stack stopped answering during the check: {exc}", hint=f"deploy up --name {name}"
        ) from exc


def _require_answers(running: RunningStack) -> None:
    """Check that every service answers, giving the router time to notice an engine's return.

    Raises:
        StackUnhealthy: naming those that do not.
    """
    deadline = time.monotonic() + _ANSWER_DEADLINE_S
    silent = list(running.stack.services)
    while silent := [service for service in silent if not running.is_ready(service)]:
        if time.monotonic() > deadline:
            names = [service.name for service in silent]
            raise StackUnhealthy(
                f"not answering: {', '.join(names)}",
                hint=f"deploy logs {names[0]} --name {running.stack.name}",
            )
        time.sleep(5 * _POLL_S)


@dataclass
class _Findings:
    """What accumulates while prompts are sent."""

    pairs: list[PairResult] = field(default_factory=list)
    race: Hits = field(default_factory=Hits)
    compared: int = 0
    mismatched: int = 0
    max_logprob_diff: float = 0.0
    expected_chunks: int = 0
    stored_keys: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def add_comparison(self, reference: Answer, answer: Answer) -> None:
        result = compare(reference, answer)
        self.compared += 1
        self.mismatched += not result.matches
        self.max_logprob_diff = max(self.max_logprob_diff, result.max_logprob_diff)


class _Check:
    """One run of the check: its clients, its prompts and what it found."""

    def __init__(self, running: RunningStack, report: Report) -> None:
        self._running = running
        self._plan = running.prepared.plan
        self._model = self._plan.model.served_name
        self._report = report
        self._found = _Findings()
        self._store_deadline_s = _STORE_DEADLINE_S
        self._random = random.Random()  # noqa: S311 - prompts, not secrets: fresh at each run
        self._exit = ExitStack()
        self._apis: dict[str, EngineApi] = {}

    def __enter__(self) -> _Check:
        for service in self._running.stack.services:
            if service.role != "redis":
                self._apis[service.name] = self._exit.enter_context(EngineApi(service.url))
        self._store: Store = store_of(self._running)
        self._exit.callback(self._store.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def run(self) -> CheckReport:
        began = time.monotonic()
        self._limit = self._apis[self._plan.engines[0].name].max_model_len()
        before = self._store.stats()
        for producer in self._plan.producers:
            for consumer in self._plan.consumers:
                self._check_pair(producer.name, consumer.name)
        self._check_router()
        after = self._store.stats()
        engines = self._engine_health()
        failures = self._failures(engines, before, after)
        return CheckReport(
            pairs=self._found.pairs,
            race=self._found.race,
            equivalence=Equivalence(
                self._found.compared, self._found.mismatched, self._found.max_logprob_diff
            ),
            store=_store_use(before, after),
            engines=engines,
            failures=failures,
            diagnosis=diagnose(self._evidence(before, after)) if failures else [],
            seconds=time.monotonic() - began,
        )

    def _check_pair(self, producer: str, consumer: str) -> None:
        hits = Hits()
        for prompt in self._prompts():
            hits += self._attempt(
                consumer, prompt, lambda p: self._pair_hits(producer, consumer, p)
            )
        self._found.pairs.append(PairResult(producer, consumer, hits))
        self._report(f"{producer} → {consumer}: {hits.hits} of {hits.eligible} eligible tokens hit")

    def _pair_hits(self, producer: str, consumer: str, prompt: list[int]) -> Hits:
        """Prefill on the producer, wait for its chunks, then decode on the consumer."""
        chunks = self._count_expected(prompt)
        keys = self._keys()
        reference = self._complete(producer, prompt)
        self._found.stored_keys += self._wait_for_chunks(keys, chunks)
        return self._decode(consumer, prompt, reference)

    def _decode(self, consumer: str, prompt: list[int], reference: Answer) -> Hits:
        api = self._apis[consumer]
        earlier = api.cache_counters()
        self._found.add_comparison(reference, self._complete(consumer, prompt))
        return self._hits_since({consumer: earlier}, len(prompt))

    def _check_router(self) -> None:
        """Send prompts through the router, which decodes the moment its prefill answers."""
        for _ in range(_ROUTER_PROMPTS):
            prompt = next(self._prompts())
            self._found.race += self._attempt("router", prompt, self._router_hits)
        race = self._found.race
        self._report(f"through the router: {race.hits} of {race.eligible} eligible tokens hit")

    def _router_hits(self, prompt: list[int]) -> Hits:
        self._count_expected(prompt)
        keys = self._keys()
        consumers = [consumer.name for consumer in self._plan.consumers]
        earlier = {name: self._apis[name].cache_counters() for name in consumers}
        answer = self._complete("router", prompt)
        hits = self._hits_since(earlier, len(prompt))
        self._found.stored_keys += self._wait_for_chunks(keys, 1)
        # Which producer the router chose is not said; any that computes the prompt itself will do.
        self._found.add_comparison(self._complete(self._plan.producers[0].name, prompt), answer)
        return hits

    def _attempt(self, whom: str, prompt: list[int], send: Callable[[list[int]], Hits]) -> Hits:
        """Send a prompt; one that is not answered counts as all of its tokens missed."""
        try:
            return send(prompt)
        except ApiError as exc:
            self._found.failed[whom] = str(exc)
            return Hits(len(prompt), 0, eligible_tokens(len(prompt), self._plan.chunk_size))

    def _complete(self, whom: str, prompt: list[int]) -> Answer:
        return self._apis[whom].complete(self._model, prompt, max_tokens=_ANSWER_TOKENS)

    def _hits_since(self, earlier: dict[str, CacheCounters], prompt_tokens: int) -> Hits:
        """Return what the consumers counted since, once they have counted the prompt."""
        deadline = time.monotonic() + _COUNTER_DEADLINE_S
        while True:
            deltas = [self._apis[name].cache_counters().since(old) for name, old in earlier.items()]
            local = sum(delta.local_hits for delta in deltas)
            queries = sum(delta.external_queries for delta in deltas)
            if queries + local >= prompt_tokens or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        hits = sum(delta.external_hits for delta in deltas)
        return Hits(queries, hits, eligible_tokens(prompt_tokens, self._plan.chunk_size, local))

    def _count_expected(self, prompt: list[int]) -> int:
        chunks = len(prompt) // self._plan.chunk_size
        self._found.expected_chunks += chunks
        return chunks

    def _keys(self) -> int:
        stats = self._store.stats()
        return stats.keys if stats else 0

    def _wait_for_chunks(self, keys_before: int, chunks: int) -> int:
        """Wait until at least one key a chunk arrived and none arrives any more; return how many.

        Every chunk takes as many keys as its format has parts, so the count is a lower bound.
        """
        deadline = time.monotonic() + self._store_deadline_s
        seen = -1
        while time.monotonic() < deadline:
            arrived = self._keys() - keys_before
            if arrived >= chunks and arrived == seen:
                return arrived
            seen = arrived
            time.sleep(5 * _POLL_S)
        self._store_deadline_s = _NEXT_STORE_DEADLINE_S
        return max(0, seen)

    def _prompts(self) -> Iterator[list[int]]:
        """Yield prompts nobody sent before: one ends within a chunk, one with a chunk."""
        chunk = self._plan.chunk_size
        room = self._limit - _ANSWER_TOKENS
        for length in (4 * chunk + chunk // 3, 2 * chunk):
            fitting = min(length, room)
            if fitting < chunk:
                raise StackUnhealthy(
                    f"the model's context of {self._limit} tokens is too short for a chunk of "
                    f"{chunk} and an answer, so no KV would ever be shared",
                    hint="set a smaller lmcache.chunk_size",
                )
            yield self._token_ids(fitting)

    def _token_ids(self, length: int) -> list[int]:
        """Return random words as exactly `length` token ids of the served model."""
        api = self._apis[self._plan.engines[0].name]
        letters = (*string.ascii_lowercase, " ")
        text = "".join(self._random.choices(letters, k=8 * length))
        return api.tokenize(self._model, text)[:length]

    def _engine_health(self) -> list[EngineHealth]:
        return [
            EngineHealth(
                engine.name,
                engine.role,
                service_is_ready(self._service(engine.name), None),
                self._running.state.services[engine.name].starts - 1,
            )
            for engine in self._plan.engines
        ]

    def _service(self, name: str) -> Service:
        return self._running.stack.service(name)

    def _failures(
        self,
        engines: list[EngineHealth],
        before: StoreStats | None,
        after: StoreStats | None,
    ) -> list[str]:
        found = self._found
        failures = [
            f"{pair.producer} → {pair.consumer}: {pair.hits.hits} of {pair.hits.eligible} "
            "eligible tokens were loaded from the store"
            for pair in found.pairs
            if not pair.complete
        ]
        if found.mismatched:
            failures.append(
                f"{found.mismatched} of {found.compared} answers differ from recomputed ones"
            )
        failures += [f"{name} did not answer: {answer}" for name, answer in found.failed.items()]
        failures += [f"{engine.name} is not healthy" for engine in engines if not engine.healthy]
        if before is None or after is None:
            failures.append("Redis does not answer")
        elif not found.stored_keys:
            failures.append("no key was added to Redis")
        return failures

    def _evidence(self, before: StoreStats | None, after: StoreStats | None) -> Evidence:
        found = self._found
        engines = [engine.name for engine in self._plan.engines]
        known = before is not None and after is not None
        return Evidence(
            stack=self._plan.name,
            hash_seeds={name: self._hash_seed(name) for name in engines},
            fixes={name: self._fix_states(name) for name in engines},
            store_reachable=known,
            stored_chunks=min(found.stored_keys, found.expected_chunks),
            expected_chunks=found.expected_chunks,
            flushes=after.flushes - before.flushes if before and after else 0,
            evicted=after.evicted_keys - before.evicted_keys if before and after else 0,
            store_restarted=bool(before and after and before.run_id != after.run_id),
            failed_requests=found.failed,
            missed=any(not pair.complete for pair in found.pairs),
            mismatched=bool(found.mismatched),
        )

    def _hash_seed(self, engine: str) -> str:
        record = self._running.state.services[engine]
        return self._running.launcher.environment(record).get("PYTHONHASHSEED", "")

    def _fix_states(self, engine: str) -> dict[str, str]:
        log = self._running.launcher.log_path(engine)
        return {found["fix"]: found["state"] for found in matches(log, _FIX_LINE)}


def _store_use(before: StoreStats | None, after: StoreStats | None) -> StoreUse:
    if before is None or after is None:
        return StoreUse()
    return StoreUse(
        before.keys, after.keys, after.used_memory_bytes, after.evicted_keys - before.evicted_keys
    )
