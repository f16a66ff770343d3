"""What every probe of a check works with: clients, fresh prompts, marked keys, what was found."""

from __future__ import annotations

import random
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from deploy.metrics.engine import CacheCounters, caches_prefixes
from deploy.metrics.page import MetricsPage
from deploy.planning.engines import ENGINE_ROLES
from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError, EngineApi, TimedOut
from deploy.runtime.whole_page import whole_page
from deploy.verify.equivalence import Completion
from deploy.verify.findings import Findings
from deploy.verify.hits import Counted
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, store_of


@dataclass(frozen=True)
class CheckReading:
    """What engines have counted at one time, and what the check has sent them.

    Attributes:
        finished, sent: requests, to producers and consumers.
        sent_tokens: of prompts sent to consumers, by the router too, answered or not.
        tokens: the consumers' own counters, added up.
    """

    finished: int
    sent: int
    sent_tokens: int
    tokens: CacheCounters

    def since(self, earlier: CheckReading) -> Counted:
        """Return the consumers' counts since then, and the requests of other clients among them.

        A request that is not done, or whose client left, never counts as finished. But an engine
        counts a prompt's tokens in the moment in which it counts its hits, at its admission: each
        is one that it held itself, or one that it asked the store for. A request that is admitted
        again, after it was preempted, counts as neither. So more tokens than were sent are others'.
        """
        grown = self.tokens.since(earlier.tokens)
        strange = grown.prompt_tokens > self.sent_tokens - earlier.sent_tokens
        return Counted(
            grown.external_queries,
            grown.external_hits,
            grown.local_hits,
            max(int(strange), self.ahead(earlier)),
        )

    def ahead(self, earlier: CheckReading) -> int:
        """Return the requests of other clients that were finished since then."""
        return self.finished - earlier.finished - (self.sent - earlier.sent)


# For one answer of 16 tokens to a prompt of 4⅓ chunks, or a metrics page. A whole check of the tiny
# model takes 8 s on two busy cores; the rest is for real models on CPUs, and for other clients'
# prompts in the queue. A hung consumer costs three of these: one itself, two behind the router.
ANSWER_TIMEOUT_S = 30.0
# Behind the router, another engine may answer when one hangs.
_ROUTER_TIMEOUTS = 2
_STORE_DEADLINE_S = 5.0
_NEXT_STORE_DEADLINE_S = 0.5  # once chunks were waited for in vain
_UNSEEN_STORE_S = 1.0  # for a store that cannot be observed
_COUNTER_DEADLINE_S = 2.0
_POLL_S = 0.02
BAD_REQUEST = 400
USERS = 8  # of a burst
# Prompts are made of the tokens of these letters. Many letters give many tokens, also if each byte
# is a token: the KV of equal tokens is nearly the same, so that mixing them up would hardly show.
_LETTERS = (
    *string.ascii_letters, *string.digits, *string.punctuation, " ",
    *map(chr, range(0xC0, 0x250)), *map(chr, range(0x391, 0x3CA)), *map(chr, range(0x410, 0x450)),
)  # fmt: skip
_SAMPLE_LETTERS = 4000


_Answer = TypeVar("_Answer")


class Session:
    """What a check knows of a stack, and how it talks to it.

    Attributes:
        found: what was measured so far.
        chunk: tokens of a chunk.
        limit: tokens that a prompt and its answer may have together.
        version: of vLLM; "" if unknown.
        front: the service that clients talk to.
        at_once: answers that may be computed in one batch and then be compared. In bfloat16 a batch
            rounds differently, in float32 by too little to matter.
        sent: requests that engines answered, directly or through the router.
        sent_tokens: tokens of all prompts sent to consumers, directly or through the router, also
            of those without an answer.
    """

    def __init__(self, running: RunningStack, keys: CheckKeys, report: Report) -> None:
        plan = running.prepared.plan
        self.running = running
        self.report = report
        self.found = Findings()
        self.keys = keys
        self.chunk = plan.chunk_size
        self.front = running.stack.front.name
        self.producers = [engine.name for engine in plan.producers]
        self.consumers = [engine.name for engine in plan.consumers]
        self.at_once = USERS if plan.dtype == "float32" else 1
        self.sent = 0
        self.sent_tokens = 0
        self._timeouts: Counter[str] = Counter()
        self._counting = threading.Lock()  # a burst's users ask from threads
        self._model = plan.model.served_name
        self._routed = 1 if plan.aggregated else 2  # engines that a request of the router meets
        self._keys_of_ranks = plan.keys_per_chunk * plan.limits.ranks
        self._store_deadline_s = _STORE_DEADLINE_S
        self._keys_per_chunk = plan.keys_per_chunk
        self._random = random.Random()  # noqa: S311 - prompts, not secrets: fresh at each run
        self._exit = ExitStack()
        self._apis: dict[str, EngineApi] = {}

    def __enter__(self) -> Session:
        for service in self.running.stack.every:
            if service.role in (*ENGINE_ROLES, "router"):
                api = self.running.api(service, timeout_s=ANSWER_TIMEOUT_S)
                self._apis[service.name] = self._exit.enter_context(api)
        self.store = self._exit.enter_context(store_of(self.running))
        first = self._apis[self.producers[0]]
        self.limit = first.max_model_len()
        self.version = first.version()
        letters = self._random.choices(_LETTERS, k=_SAMPLE_LETTERS)
        # Any order of these ids is a prompt.
        self._tokens = sorted(set(first.tokenize(self._model, "".join(letters))))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def engines(self) -> list[str]:
        """The names of all engines that are checked, each once."""
        return list(dict.fromkeys((*self.producers, *self.consumers)))

    def fresh(self, length: int) -> list[int]:
        """Return the ids of `length` tokens that were never sent before."""
        return self._random.choices(self._tokens, k=length)

    def ask(  # noqa: PLR0913 - options of one request
        self,
        whom: str,
        prompt: Sequence[int],
        *,
        tag: str = "",
        salt: str = "",
        tokens: int = ANSWER_TOKENS,
        timeout_s: float | None = None,
        blames: bool = True,
    ) -> Completion:
        """Complete a prompt greedily, and remember who did not answer.

        A service that timed out is not asked again: a hung engine would take as long each time.

        Args:
            tag: marks the keys of its KV, which only requests with this tag find.
            salt: keeps its KV out of the store and from other prompts.
            timeout_s: for this answer, where it may take longer than others.
            blames: an answer other than 200 is the service's fault, not the prompt's.

        Raises:
            ApiError: no answer.
        """
        if self.is_given_up(whom):
            raise ApiError(0, f"{whom} is not asked again, since it did not answer in time")
        if whom == self.front or whom in self.consumers:
            with self._counting:
                self.sent_tokens += len(prompt)
        with self._blamed(whom, prompt=not blames):
            answer = self._apis[whom].complete(
                self._model, prompt, max_tokens=tokens, tag=tag, salt=salt, timeout_s=timeout_s
            )
        with self._counting:
            self.sent += self._routed if whom == self.front else 1
        return answer

    def is_given_up(self, whom: str) -> bool:
        """Tell whether a service timed out, so that it is not asked again."""
        return self._timeouts[whom] >= (_ROUTER_TIMEOUTS if whom == self.front else 1)

    def each(self, ask: Callable[..., _Answer], *asked: Iterable[Any]) -> Iterator[_Answer]:
        """Yield results of `ask` as `map` does, with `at_once` calls at a time."""
        if self.at_once == 1:
            yield from map(ask, *asked)
            return
        with ThreadPoolExecutor(self.at_once) as pool:
            yield from pool.map(ask, *asked)

    def computed(
        self, producer: str, prompt: Sequence[int], tag: str, *, timeout_s: float | None = None
    ) -> Completion:
        """Return the answer of a producer that computes the prompt; note it if it loads it."""
        answer = self.ask(producer, prompt, tag=tag, timeout_s=timeout_s)
        if answer.cached_tokens:
            self.found.not_recomputed.add(producer)
        return answer

    def await_chunks(self, tag: str, chunks: int, *, settled: bool = False) -> int | None:
        """Wait until Redis has the keys of this many chunks, and count them for the diagnosis.

        Every rank of an engine stores its own keys, so there may be more. Returns the number of
        keys; None if unknown.

        Args:
            settled: wait until no more are added. A producer answers after its stores, a consumer
                before.
        """
        self.found.expected_chunks += chunks
        deadline, before = time.monotonic() + self._store_deadline_s, -1
        while (keys := self.keys.count(self.store, tag)) is not None:
            if keys >= chunks * self._keys_per_chunk and (keys == before or not settled):
                break
            if time.monotonic() > deadline:
                self._store_deadline_s = _NEXT_STORE_DEADLINE_S
                break
            before = keys
            time.sleep(5 * _POLL_S)
        if keys is None and settled:
            time.sleep(_UNSEEN_STORE_S)
        self.found.add_stored(keys)
        return keys

    def keys_stored(self) -> int | None:
        """Count the keys of Redis; None if unknown."""
        stats = self.store.stats()
        return stats.keys if stats else None

    def await_more_keys(self, before: int | None, chunks: int) -> None:
        """Wait until chunks of a prompt without a tag were added, or the time is up.

        An aggregated engine answers before its stores have ended.
        """
        deadline = time.monotonic() + self._store_deadline_s
        while before is not None and (keys := self.keys_stored()) is not None:
            if keys >= before + chunks * self._keys_of_ranks:
                return
            if time.monotonic() > deadline:
                self._store_deadline_s = _NEXT_STORE_DEADLINE_S
                return
            time.sleep(5 * _POLL_S)
        time.sleep(_UNSEEN_STORE_S)

    def pages(self) -> dict[str, MetricsPage]:
        """Return every engine's metrics page; an empty one where it does not answer."""
        found = dict.fromkeys(self.engines, MetricsPage())
        for name in found:
            with suppress(ApiError):
                found[name] = whole_page(self._apis[name].metrics)
        return found

    def count_vanished(self, tag: str, stored: int | None) -> None:
        """Note how many keys of a tag are gone since they were seen."""
        now = self.keys.count(self.store, tag)
        if None not in (now, stored):
            self.found.vanished += max(0, (stored or 0) - (now or 0))

    def tokenized(self, text: str) -> list[int]:
        """Return a text's token ids as a completion of it has them, special ones included."""
        return self._apis[self.producers[0]].tokenize(self._model, text, special=True)

    def caches_prefixes(self, name: str) -> bool:
        """Tell whether an engine has its own prefix cache."""
        return caches_prefixes(self._apis[name].metrics())

    def cache_counters(self, name: str) -> CacheCounters:
        """Return an engine's counts of queries and hits, since it was started."""
        return self._apis[name].cache_counters()

    def counted_for(self, name: str, earlier: CacheCounters) -> CacheCounters:
        """Wait until an engine has counted something since then, and return it."""
        deadline = time.monotonic() + _COUNTER_DEADLINE_S
        while True:
            found = self.cache_counters(name).since(earlier)
            if found.prompt_tokens or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def finished(self, names: Iterable[str]) -> int:
        """Return the requests that engines have finished since their start."""
        return sum(self._apis[name].finished_requests() for name in names)

    def reading(self) -> CheckReading:
        """Return the engines' counts so far, and the requests sent to them."""
        # Requests first: what has finished by then is among the tokens.
        finished = self.finished(self.engines)
        tokens = sum(map(self.cache_counters, self.consumers), CacheCounters())
        return CheckReading(finished, self.sent, self.sent_tokens, tokens)

    def counted_since(self, earlier: CheckReading) -> Counted:
        """Wait until consumers have counted our own requests, and return the counts since then."""
        deadline = time.monotonic() + _COUNTER_DEADLINE_S
        while True:
            now = self.reading()
            if now.ahead(earlier) >= 0 or time.monotonic() > deadline:
                return now.since(earlier)
            time.sleep(_POLL_S)

    @contextmanager
    def _blamed(self, whom: str, *, prompt: bool = False) -> Iterator[None]:
        """Remember why a service did not answer, unless it only refused the prompt."""
        try:
            yield
        except ApiError as exc:
            if prompt and exc.status == BAD_REQUEST:
                raise
            self.found.failed[whom] = str(exc)
            if isinstance(exc, TimedOut):
                self._note_timeout(whom, exc)
            raise

    def _note_timeout(self, whom: str, exc: TimedOut) -> None:
        with self._counting:
            told = self.is_given_up(whom)
            self._timeouts[whom] += 1
            last = self.is_given_up(whom)
            if last:
                self.found.failed[whom] = f"{exc}; it was not asked again"
        if not told:
            self.report(f"{whom}: {exc}{'; it is not asked again' if last else ''}")
