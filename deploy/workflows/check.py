"""`deploy check`: prove on the running stack that KV crosses, and that it is right."""

from __future__ import annotations

import contextlib
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from deploy.errors import StackUnhealthy
from deploy.runtime.engine_api import ApiError, CacheCounters, EngineApi
from deploy.runtime.home import Home
from deploy.stack.build import API_KEY
from deploy.verify.diagnosis import diagnose
from deploy.verify.eligible import eligible_tokens
from deploy.verify.equivalence import Answer
from deploy.verify.findings import Findings, failures
from deploy.verify.report import CheckReport, Hits, PairResult
from deploy.verify.store_path import StorePath, moved, total
from deploy.workflows.evidence import engine_health, gather_evidence, store_use
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, require_running, require_stack, store_of

# Tokens that each answer has. With 16, every misplaced chunk, layer or head that was tried on the
# tiny model moved a log-probability past the tolerance (scripts/tiny_model_power.py).
_ANSWER_TOKENS = 16
_ROUTER_PROMPTS = 2
_ATTEMPTS = 3  # at a prompt whose counters were moved by others' requests as well
_ANSWER_DEADLINE_S = 10.0
_STORE_DEADLINE_S = 5.0
_NEXT_STORE_DEADLINE_S = 0.5  # once chunks were waited for in vain
_COUNTER_DEADLINE_S = 2.0
_POLL_S = 0.02
_RENEWALS = 5

Counters = dict[str, CacheCounters]


class _Blurred(Exception):
    """Counters moved by more than the prompt that was sent."""


def check_stack(home: Home, name: str, report: Report) -> CheckReport:
    """Check a running stack. The caller holds its lock, for two checks would blur each other.

    Raises:
        StateError: there is no such stack.
        StackUnhealthy: a service of it does not run or does not answer, so nothing can be checked.
    """
    running = require_stack(home, name)
    require_running(running)
    require_answers(running)
    try:
        with _Check(running, report) as check:
            return check.run()
    except ApiError as exc:
        raise StackUnhealthy(
            f"the stack stopped answering during the check: {exc}",
            hint=f"deploy up --resume --name {name}",
        ) from exc


def renew_store_connections(running: RunningStack) -> None:
    """Send throw-away prompts until engines that outlived their Redis have found the new one.

    An engine notices a dead connection by the request that fails on it.
    """
    with _Check(running, lambda _: None) as check:
        check.renew_connections()


def require_answers(running: RunningStack) -> None:
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
                hint=f"deploy logs {names[0]} --name {running.stack.name}, or down and up again",
            )
        time.sleep(5 * _POLL_S)


@dataclass(frozen=True)
class _Stored:
    """How many keys were ever stored.

    Attributes:
        by_producers: as they say, who know their own from anybody else's; None where they do not
            count, or have not begun to.
        in_redis: everybody's; None where producers count, or Redis does not tell.
    """

    by_producers: int | None = None
    in_redis: int | None = None

    def since(self, earlier: _Stored) -> int | None:
        if self.by_producers is not None:
            return self.by_producers - (earlier.by_producers or 0)
        if self.in_redis is None or earlier.in_redis is None:
            return None
        return self.in_redis - earlier.in_redis


class _Check:
    """One run of the check: its clients, its prompts and what it found."""

    def __init__(self, running: RunningStack, report: Report) -> None:
        self._running = running
        self._plan = running.prepared.plan
        self._model = self._plan.model.served_name
        self._front = running.stack.front.name
        self._producers = [engine.name for engine in self._plan.producers]
        self._consumers = [engine.name for engine in self._plan.consumers]
        self._report = report
        self._found = Findings()
        self._store_deadline_s = _STORE_DEADLINE_S
        self._random = random.Random()  # noqa: S311 - prompts, not secrets: fresh at each run
        self._exit = ExitStack()
        self._apis: dict[str, EngineApi] = {}

    def __enter__(self) -> _Check:
        for service in self._running.stack.services:
            if service.role != "redis":
                key = self._running.secrets.get(API_KEY)
                api = EngineApi(service.url, api_key=key if service.name == self._front else None)
                self._apis[service.name] = self._exit.enter_context(api)
        self._store = self._exit.enter_context(store_of(self._running))
        self._limit = self._apis[self._producers[0]].max_model_len()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def run(self) -> CheckReport:
        began = time.monotonic()
        before, path = self._store.stats(), self._store_path()
        for producer in self._producers:
            for consumer in self._consumers:
                self._check_pair(producer, consumer)
        self._check_router()
        after = self._store.stats()
        engines = engine_health(self._running)
        self._found.path = moved(path, self._store_path())
        failed = list(failures(self._found, engines, store_answers=None not in (before, after)))
        # Only a failure is worth reading the engines' whole logs for.
        causes = (
            diagnose(gather_evidence(self._running, self._found, before, after)) if failed else []
        )
        return CheckReport(
            pairs=self._found.pairs,
            race=self._found.race,
            equivalence=self._found.equivalence,
            store=store_use(before, after),
            path=self._found.path,
            engines=engines,
            failures=failed,
            diagnosis=causes,
            seconds=time.monotonic() - began,
        )

    def _store_path(self) -> dict[str, StorePath | None]:
        names = (*self._producers, *self._consumers)
        return {name: self._apis[name].store_path() for name in names}

    def renew_connections(self) -> None:
        for _ in range(_RENEWALS):
            prompt = self._token_ids(self._lengths()[0])
            earlier = self._counters(self._consumers)
            for name in (*self._producers, *self._consumers):
                with contextlib.suppress(ApiError):
                    self._complete(name, prompt)
            now = self._counters(self._consumers)
            if all(now[name].since(old).external_hits for name, old in earlier.items()):
                return

    def _check_pair(self, producer: str, consumer: str) -> None:
        hits = Hits()
        for length in self._lengths():
            hits += self._attempt(length, lambda p: self._pair_hits(producer, consumer, p))
        self._found.pairs.append(PairResult(producer, consumer, hits))
        self._report(f"{producer} → {consumer}: {hits.hits} of {hits.eligible} eligible tokens hit")

    def _pair_hits(self, producer: str, consumer: str, prompt: list[int]) -> Hits:
        """Prefill on the producer, wait for its chunks, then decode on the consumer."""
        chunks = self._count_expected(prompt)
        keys = self._stored([producer])
        reference = self._recompute(producer, prompt)
        self._found.add_stored(self._wait_for_chunks([producer], keys, chunks))
        earlier = self._counters([consumer])
        answer = self._complete(consumer, prompt)
        self._found.add_comparison(reference, answer)
        return self._hits_since(earlier, len(prompt))

    def _check_router(self) -> None:
        """Send prompts through the router, which decodes the moment its prefill answers."""
        for _ in range(_ROUTER_PROMPTS):
            self._found.race += self._attempt(self._lengths()[0], self._router_hits)
        race = self._found.race
        self._report(f"through the router: {race.hits} of {race.eligible} eligible tokens hit")

    def _router_hits(self, prompt: list[int]) -> Hits:
        chunks = self._count_expected(prompt)
        keys = self._stored(self._producers)
        prefill, decode = self._counters(self._producers), self._counters(self._consumers)
        answer = self._complete(self._front, prompt)
        hits = self._hits_since(decode, len(prompt))
        seen = self._settled(prefill, len(prompt))
        producer = max(seen, key=lambda name: _asked(seen[name]))
        if _asked(seen[producer]) == 0:
            self._found.bypassed += 1
            return hits
        if seen[producer].external_hits:
            self._found.not_recomputed.add(producer)
        self._found.add_stored(self._wait_for_chunks(self._producers, keys, chunks))
        # The same producer again: another one would load the very bytes that are in question.
        self._found.add_comparison(self._recompute(producer, prompt), answer)
        return hits

    def _attempt(self, length: int, send: Callable[[list[int]], Hits]) -> Hits:
        """Send a fresh prompt; one that is not answered counts as all of its tokens missed."""
        missed = Hits(length, 0, eligible_tokens(length, self._plan.chunk_size))
        for _ in range(_ATTEMPTS):
            try:
                return send(self._token_ids(length))
            except ApiError:
                return missed
            except _Blurred:
                continue
        self._found.blurred += 1
        return missed

    def _recompute(self, producer: str, prompt: list[int]) -> Answer:
        """Return the answer of an engine that computes the prompt; note it if it loads it."""
        earlier = self._counters([producer])
        answer = self._complete(producer, prompt)
        if self._settled(earlier, len(prompt))[producer].external_hits:
            self._found.not_recomputed.add(producer)
        return answer

    def _complete(self, whom: str, prompt: list[int]) -> Answer:
        with self._blamed(whom):
            return self._apis[whom].complete(self._model, prompt, max_tokens=_ANSWER_TOKENS)

    def _counters(self, names: Sequence[str]) -> Counters:
        counters = {}
        for name in names:
            with self._blamed(name):
                counters[name] = self._apis[name].cache_counters()
        return counters

    @contextmanager
    def _blamed(self, whom: str) -> Iterator[None]:
        try:
            yield
        except ApiError as exc:
            self._found.failed[whom] = str(exc)
            raise

    def _hits_since(self, earlier: Counters, prompt_tokens: int) -> Hits:
        """Return what the consumers counted for a prompt."""
        deltas = self._settled(earlier, prompt_tokens).values()
        local = sum(delta.local_hits for delta in deltas)
        return Hits(
            queries=sum(delta.external_queries for delta in deltas),
            hits=sum(delta.external_hits for delta in deltas),
            eligible=eligible_tokens(prompt_tokens, self._plan.chunk_size, local),
        )

    def _settled(self, earlier: Counters, prompt_tokens: int) -> Counters:
        """Return what engines counted since, once all of them together counted the prompt.

        Raises:
            _Blurred: they counted more than the prompt.
        """
        deadline = time.monotonic() + _COUNTER_DEADLINE_S
        while True:
            now = self._counters(list(earlier))
            deltas = {name: now[name].since(old) for name, old in earlier.items()}
            asked = sum(map(_asked, deltas.values()))
            if asked > prompt_tokens:
                raise _Blurred
            if asked == prompt_tokens or time.monotonic() > deadline:
                return deltas
            time.sleep(_POLL_S)

    def _count_expected(self, prompt: list[int]) -> int:
        chunks = len(prompt) // self._plan.chunk_size
        self._found.expected_chunks += chunks
        return chunks

    def _stored(self, producers: Sequence[str]) -> _Stored:
        paths = []
        for name in producers:
            with self._blamed(name):
                paths.append(self._apis[name].store_path())
        path = total(paths)
        if path is not None:
            return _Stored(by_producers=int(path.stored_chunks))
        stats = self._store.stats()
        if stats is None:
            return _Stored(in_redis=0)
        # In a full Redis each new key evicts another.
        keys = None if stats.keys is None else stats.keys + (stats.evicted_keys or 0)
        return _Stored(in_redis=keys)

    def _wait_for_chunks(
        self, producers: Sequence[str], before: _Stored, chunks: int
    ) -> int | None:
        """Wait until at least one key a chunk is stored and none more is; return how many were.

        Every chunk takes as many keys as its format has parts, so the count is a lower bound. None
        where nobody tells.
        """
        deadline = time.monotonic() + self._store_deadline_s
        seen = -1
        while time.monotonic() < deadline:
            arrived = self._stored(producers).since(before)
            if arrived is None or (arrived >= chunks and arrived == seen):
                return arrived
            seen = arrived
            time.sleep(5 * _POLL_S)
        self._store_deadline_s = _NEXT_STORE_DEADLINE_S
        return max(0, seen)

    def _lengths(self) -> tuple[int, ...]:
        """Return the prompts' lengths in tokens: one ends within a chunk, one with a chunk."""
        chunk = self._plan.chunk_size
        room = self._limit - _ANSWER_TOKENS
        if room < chunk:
            raise StackUnhealthy(
                f"the model's context of {self._limit} tokens is too short for a chunk of "
                f"{chunk} and an answer, so no KV would ever be shared",
                hint="set a smaller lmcache.chunk_size",
            )
        return min(4 * chunk + chunk // 3, room), min(2 * chunk, room)

    def _token_ids(self, length: int) -> list[int]:
        """Return random letters, which nobody sent before, as `length` token ids of the model."""
        letters = (*string.ascii_lowercase, " ")
        text = "".join(self._random.choices(letters, k=8 * length))
        return self._apis[self._producers[0]].tokenize(self._model, text)[:length]


def _asked(delta: CacheCounters) -> int:
    """Return the prompt tokens that an engine looked up, in its own cache or in the store."""
    return delta.external_queries + delta.local_hits
