"""What a check sends to a stack: each probe asks one question with its own prompts.

A probe adds its results to the session's findings. Unanswered requests count as misses. What a
probe cannot do on a stack is reported as skipped, not as failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat

from deploy.metrics.engine import CacheCounters
from deploy.metrics.lmcache_server import looked_up_tokens, tiers_of
from deploy.metrics.page import MetricsPage
from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.verify.equivalence import Completion
from deploy.verify.hits import Counted, Hits, PairResult, Phase, Tiers, added, eligible_tokens
from deploy.verify.own_prompt import OwnPrompt
from deploy.workflows.check.keys import key_name
from deploy.workflows.check.session import USERS, Session
from deploy.workflows.running import RunningStack, kv_server_page

LEFT_OUT = (
    "the number of keys in Redis, because LMCache's server stores them; what the check stores "
    "stays until it is evicted",
)
_LOOKED_UP_WITHIN_S, _LOOKED_UP_POLL_S = 2.0, 0.02
# LMCache's server stores in Redis behind the producer's answer.
_STORED_WITHIN_S, _STORED_POLL_S = 10.0, 0.05


@dataclass(frozen=True)
class TierReading:
    """What a consumer and LMCache's server have counted.

    Attributes:
        server: None without one, without its answer, or if an engine has one on another host.
    """

    cache: CacheCounters
    server: MetricsPage | None

    @classmethod
    def of(cls, session: Session, producer: str, consumer: str) -> TierReading:
        """Read both, before the producer gets a prompt.

        Raises:
            ApiError: the consumer does not answer.
        """
        remote = {one.name for one in session.running.stack.remote}
        server = None if {producer, consumer} & remote else _server_page(session)
        return cls(session.cache_counters(consumer), server)

    def since(
        self, session: Session, consumer: str, answer: Completion, asked: int
    ) -> Tiers | None:
        """Return where the KV of one prompt came from since then.

        None if no server tells, or if others' requests moved the consumer's counters.

        Args:
            answer: the consumer's.
            asked: tokens of the prompt's whole chunks.

        Raises:
            ApiError: the consumer does not answer.
        """
        cache, server = session.counted_for(consumer, self.cache), None
        if session.running.prepared.plan.kv_server:
            server = self._looked_up(session, 2 * asked)  # by the producer and by the consumer
            if server is None:
                return None
        found = tiers_of(cache, server)
        reused = found.local + found.server + found.redis
        whole = (answer.prompt_tokens, answer.cached_tokens)
        return found if (found.asked, reused) == whole else None

    def _looked_up(self, session: Session, tokens: int) -> MetricsPage | None:
        """Wait until the server has counted its answers, and return its counts."""
        deadline = time.monotonic() + _LOOKED_UP_WITHIN_S
        while self.server is not None and (page := _server_page(session)) is not None:
            counted = page.since(self.server)
            if looked_up_tokens(counted) >= tokens or time.monotonic() > deadline:
                return counted
            time.sleep(_LOOKED_UP_POLL_S)
        return None


def _server_page(session: Session) -> MetricsPage | None:
    return next(iter(kv_server_page(session.running).values()), None)


# Where prompts are cut, in quarters of each chunk.
_CUTS, _QUICK_CUTS = (1, 2, 3, 4), (2,)
_CUT_TAIL = 8  # fresh tokens after a cut
_CUT_ANSWER_TOKENS = 8


def lengths(session: Session) -> tuple[int, ...]:
    """Return the lengths of prompts in tokens: one ends within a chunk, one with a chunk.

    Empty if the model's context has no room for a chunk and an answer.
    """
    chunk, room = session.chunk, session.limit - ANSWER_TOKENS
    if room < chunk:
        return ()
    return tuple(dict.fromkeys((min(4 * chunk + chunk // 3, room), min(2 * chunk, room))))


def measure_noise(session: Session, engines: Sequence[str], *, quick: bool = False) -> None:
    """Have each engine compute prompts, then answer them from its prefix cache, many at once.

    This reads KV back as loading does, and batches as the burst does: both may change rounding. The
    salt keeps the store out of it, so that wrong KV there cannot raise the noise floor.
    """
    for name in engines:
        prompts = [session.fresh(length) for length in lengths(session)[:1] * (1 if quick else 2)]
        with suppress(ApiError):
            computed = _salted(session, name, prompts)
            again = len(prompts) * (USERS // len(prompts))
            with ThreadPoolExecutor(again) as pool:
                parts = [prompts[user % len(prompts) :][:1] for user in range(again)]
                cached = list(pool.map(_salted, repeat(session), repeat(name), parts))
            for user, (answer,) in enumerate(cached):
                session.found.add_noise(name, computed[user % len(prompts)], answer)


def _salted(session: Session, name: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    return [session.ask(name, prompt, salt=session.keys.run) for prompt in prompts]


def check_pair(session: Session, producer: str, consumer: str, *, quick: bool = False) -> None:
    """Prefill on the producer, decode on the consumer; compare with what the producer computed.

    Args:
        quick: cut the prompt once a chunk only.
    """
    hits = Hits()
    tiers: list[Tiers | None] = []
    for number, length in enumerate(lengths(session)):
        prompt, tag = session.fresh(length), session.keys.new_tag()
        missed, chunks = hits_of(session, length, 0), length // session.chunk
        try:
            before = TierReading.of(session, producer, consumer)
            reference = session.computed(producer, prompt, tag)
            stored = session.await_chunks(tag, chunks)
            answer = session.ask(consumer, prompt, tag=tag)
            tiers.append(before.since(session, consumer, answer, chunks * session.chunk))
        except ApiError:
            hits += missed
            tiers.append(None)
            continue
        hits += hits_of(session, length, answer.cached_tokens)
        if answer.cached_tokens < eligible_tokens(length, session.chunk):
            session.count_vanished(tag, stored)
        session.found.add_comparison(reference, answer)
        if not number:
            cuts = _cuts(session, prompt, _QUICK_CUTS if quick else _CUTS)
            hits += compare_beginnings(session, (producer, consumer), cuts, tag)
    pair = PairResult(producer, consumer, hits, added(tiers))
    session.found.pairs.append(pair)
    if pair.tiers and pair.tiers.redis and session.running.prepared.plan.kv_server:
        session.found.past_server[pair.name] = pair.tiers.redis
    session.report(f"{producer} → {consumer}: {said(hits)}")


def _cuts(session: Session, prompt: Sequence[int], quarters: Sequence[int]) -> Iterator[list[int]]:
    """Yield the prompt's beginnings that end at these quarters of each whole chunk, and a tail.

    Attention to a whole prompt adds up the same numbers in any order: exchanged chunks, or
    exchanged rows within one, show only if some of them are cut off. Each cut has another tail, so
    that an error that hardly changes one answer changes another.
    """
    for start in range(0, len(prompt) - session.chunk + 1, session.chunk):
        for quarter in quarters:
            end = start + session.chunk * quarter // 4
            yield [*prompt[:end], *session.fresh(_CUT_TAIL)]


def compare_beginnings(
    session: Session, pair: tuple[str, str], cuts: Iterable[Sequence[int]], tag: str
) -> Hits:
    """Compare answers to beginnings of a prompt, whose blocks both engines hold.

    An engine without a prefix cache holds none, and would load them from the store. So a producer
    gets a salt, as its answer has to be computed; and what a consumer loads is returned, as it has
    to load all that is eligible.
    """
    (producer, consumer), cuts = pair, list(cuts)
    try:
        own_tag, salt = _without_loading(session, producer, tag)
        loads = not session.caches_prefixes(consumer)
    except ApiError:
        return Hits()

    def answers(cut: Sequence[int]) -> list[Completion]:
        with suppress(ApiError):
            reference = session.ask(
                producer, cut, tag=own_tag, salt=salt, tokens=_CUT_ANSWER_TOKENS
            )
            return [reference, session.ask(consumer, cut, tag=tag, tokens=_CUT_ANSWER_TOKENS)]
        return []

    loaded = Hits()
    for cut, found in zip(cuts, session.each(answers, cuts), strict=True):
        if found:
            session.found.add_comparison(*found)
        if loads:
            loaded += hits_of(session, len(cut), found[-1].cached_tokens if found else 0)
    return loaded


def _without_loading(session: Session, engine: str, tag: str) -> tuple[str, str]:
    """Return tag and salt by which an engine answers a prompt again without the store.

    Raises:
        ApiError: it does not say whether it has a prefix cache of its own.
    """
    return (tag, "") if session.caches_prefixes(engine) else ("", session.keys.run)


def check_own_prompt(session: Session, producer: str, consumer: str, prompt: list[int]) -> None:
    """Send a user's prompt as clients do, unmarked, and see where each engine got its KV from."""
    try:
        _, prefilled = counting(session, producer, prompt)
        _, decoded = counting(session, consumer, prompt)
    except ApiError:
        return  # already recorded as a failure
    found = OwnPrompt(
        producer,
        consumer,
        len(prompt),
        session.chunk,
        prefilled.local_hits,
        prefilled.external_hits,
        decoded.local_hits,
        decoded.external_hits,
    )
    session.found.prompts.append(found)
    session.report(found.sentence or f"your prompt, {found.name}: all came from the store")


def counting(
    session: Session, engine: str, prompt: Sequence[int], *, tag: str = "", blames: bool = True
) -> tuple[Completion, CacheCounters]:
    """Ask an engine, and return its answer, and what its own counters say of it.

    If other clients' requests move the counters, too, the answer's own count of cached tokens is
    the limit, and what is not local counts as loaded from the store.
    """
    before = session.cache_counters(engine)
    answer = session.ask(engine, prompt, tag=tag, blames=blames)
    found = session.counted_for(engine, before)
    if found.local_hits + found.external_hits <= answer.cached_tokens:
        return answer, found
    local = min(found.local_hits, answer.cached_tokens)
    return answer, replace(found, local_hits=local, external_hits=answer.cached_tokens - local)


def check_decode_reuse(session: Session) -> None:
    """Have a consumer decode half a chunk, and a producer load it as the next turn's beginning.

    It goes on decoding for a quarter of a chunk: what is stored meanwhile need not be waited for.
    """
    # The first and the last aggregated engine are different ones.
    chunk, consumer = session.chunk, session.consumers[-1]
    prompt, tag = session.fresh(chunk + chunk // 2), session.keys.new_tag()
    decodes = chunk // 2 + chunk // 4
    follow_up = len(prompt) + decodes + _CUT_TAIL
    if follow_up + ANSWER_TOKENS > session.limit:
        session.found.decode_reuse = Phase(skipped=f"the context has {session.limit} tokens")
        return
    try:
        session.ask(session.producers[0], prompt, tag=tag, tokens=1)
        decoded = session.ask(consumer, prompt, tag=tag, tokens=decodes)
        session.await_chunks(tag, 2, settled=True)
        prompt = [*prompt, *token_ids(decoded), *session.fresh(_CUT_TAIL)]
        own_tag, salt = _without_loading(session, consumer, tag)
        reference = session.ask(consumer, prompt, tag=own_tag, salt=salt)
        answer = session.ask(session.producers[0], prompt, tag=tag)
    except ApiError:
        session.found.decode_reuse = Phase(Hits(0, 0, 2 * chunk), 4, 1)
        return
    # The whole chunks of the conversation so far; the new tokens complete none.
    loaded = Hits(len(prompt), min(answer.cached_tokens, 2 * chunk), 2 * chunk)
    session.found.add_comparison(reference, answer)
    session.found.decode_reuse = Phase(loaded, 4)
    session.report(f"decoded on {consumer}, loaded again: {said(loaded)}")


def hits_of(session: Session, prompt_tokens: int, cached: int) -> Hits:
    """Return the hits of a prompt that is new to all engines."""
    return Hits(prompt_tokens, cached, eligible_tokens(prompt_tokens, session.chunk))


def held(counted: Counted, eligible: int) -> int:
    """Return the hits of prompts whose beginnings may be in an engine's own cache.

    Local hits may end within a chunk, so they count only up to what is eligible; more hits from the
    store than are eligible are an error, too.
    """
    return max(counted.hits, min(counted.hits + counted.local_hits, eligible))


def token_ids(answer: Completion) -> list[int]:
    """Return the ids of an answer's tokens, which vLLM names `token_id:N`."""
    return [int(token.rpartition(":")[2]) for token in answer.tokens]


def said(hits: Hits) -> str:
    """Return hits in words, for progress."""
    return f"{hits.hits} of {hits.eligible} eligible tokens hit"


def check_second_tier(session: Session) -> None:
    """Drop a prompt's KV from the server's memory once Redis has it, and have a consumer load it.

    What is loaded then can only come from Redis, whatever else the stack serves meanwhile.
    """
    pair = next(_pairs(session), None)
    if pair is None:
        session.found.second_tier = Phase(skipped="there is one engine")
        return
    length, (producer, consumer) = lengths(session)[0], pair
    prompt = session.fresh(length)
    logs = f"deploy logs kv-server --name {session.running.stack.name}"
    try:
        reference = session.computed(producer, prompt, "")
        if not drop_from_memory(session.running, prompt):
            session.found.second_tier = Phase(hits_of(session, length, 0), 2)
            session.report(f"from Redis alone: Redis does not get a prompt's KV in time; {logs}")
            return
        answer = session.ask(consumer, prompt)
    except ApiError as exc:
        session.report(f"from Redis alone: no answer ({exc}); {logs}")
        session.found.second_tier = Phase(hits_of(session, length, 0), 2, 1)
        return
    session.found.add_comparison(reference, answer)
    session.found.second_tier = Phase(hits_of(session, length, answer.cached_tokens), 2)
    session.report(f"from Redis alone: {said(session.found.second_tier.hits)}")


def _pairs(session: Session) -> Iterator[tuple[str, str]]:
    """Yield pairs that share KV through Redis once this host's server has dropped it."""
    remote = {one.name for one in session.running.stack.remote}
    for consumer in reversed(session.consumers):
        for producer in session.producers:
            # Two engines of another host have a server there.
            if producer != consumer and not {producer, consumer} <= remote:
                yield producer, consumer


def drop_from_memory(running: RunningStack, prompt: Sequence[int]) -> bool:
    """Have LMCache's server drop a prompt's KV from its memory once Redis has it.

    Returns:
        Whether that happened in time.
    """
    plan = running.prepared.plan
    if plan.kv_server is None:
        return False
    model = key_name(running, plan.engines[0].name, timeout_s=5.0)
    deadline = time.monotonic() + _STORED_WITHIN_S
    with EngineApi(running.stack.service(plan.kv_server.name).url, timeout_s=5.0) as api:
        while not api.forget(model, plan.limits.ranks, prompt):
            if time.monotonic() > deadline:
                return False
            time.sleep(_STORED_POLL_S)
    return True
