"""What a check asks of aggregated engines, one of which the router chooses for each request.

If they share KV, each must load what another one computed. If not, there is no KV to reuse: answers
must be equal, and the router must use every engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError
from deploy.verify.hits import Hits, Phase, eligible_tokens
from deploy.workflows.check.probes import held, lengths, said
from deploy.workflows.check.routed import ATTEMPTS, ROUTER_PROMPTS, TURNS, conversation, last_turn
from deploy.workflows.check.session import Session

_REACH_ATTEMPTS = 5


def check_spread(session: Session) -> None:
    """Send a prompt through the router once for each engine: all but the first must load it."""
    found = session.found
    for length in lengths(session)[:1] * ROUTER_PROMPTS:
        for _ in range(ATTEMPTS):
            phase, idle = _spread(session, length)
            if not phase.blurred:
                break
        found.race += phase
        if not (phase.blurred or phase.failed):
            found.unreached.update(idle)
    session.report(f"through the router: {said(found.race.hits)}")


def _spread(session: Session, length: int) -> tuple[Phase, set[str]]:
    """Return the tokens that were loaded of a prompt, and the engines that did not see it."""
    prompt, others = session.fresh(length), len(session.engines) - 1
    eligible = others * eligible_tokens(length, session.chunk)
    queries = others * length
    try:
        reference = session.ask(session.engines[0], prompt, salt=session.keys.new_salt())
        with _marked_later(session, prompt):
            finished, before = _finished(session), session.reading()
            keys = session.keys_stored()
            answers = [session.ask(session.front, prompt)]
            session.await_more_keys(keys, length // session.chunk)
            answers += [session.ask(session.front, prompt) for _ in range(others)]
            counted = session.counted_since(before)
            idle = {name for name, count in _finished(session).items() if count == finished[name]}
    except ApiError:
        return Phase(Hits(queries, 0, eligible), 1 + others, 1), set()
    for answer in answers:
        session.found.add_comparison(reference, answer)
    hits = Hits(queries, counted.hits, eligible)
    return Phase(hits, 1 + others, blurred=counted.others > 0), idle


def check_shared_turns(session: Session) -> None:
    """Hold a conversation through the router: each turn finds what other engines stored before."""
    last = last_turn(session)
    if last is None:
        return
    phase, known, chunk = Phase(), 0, session.chunk
    try:
        turns = list(conversation(session, last))
        with _marked_later(session, turns[-1][0]):
            for prompt, reference in turns:
                before, keys = session.reading(), session.keys_stored()
                answer = session.ask(session.front, prompt)
                session.await_more_keys(keys, (len(prompt) - known) // chunk)
                counted = session.counted_since(before)
                eligible = min(known, len(prompt) - 1)
                hits = Hits(len(prompt), held(counted, eligible), eligible)
                phase += Phase(hits, 1, blurred=counted.others > 0)
                session.found.add_comparison(reference, answer)
                known = (len(prompt) + _stored_answer(session)) // chunk * chunk
    except ApiError:
        phase += Phase(requests=1, failed=1)
    session.found.turns = phase
    session.report(f"a conversation of {TURNS} turns: {said(phase.hits)}")


def _stored_answer(session: Session) -> int:
    """Return an answer's tokens whose KV is stored: all but the last, which nothing computes."""
    return ANSWER_TOKENS - 1 if session.running.prepared.plan.save_decode_cache else 0


@contextmanager
def _marked_later(session: Session, prompt: list[int]) -> Iterator[None]:
    """Send a prompt with a tag at the end, so that the check's keys of it can be removed.

    Not before: the engine would hold it then, and not load it.
    """
    try:
        yield
    finally:
        with suppress(ApiError):
            session.ask(session.engines[0], prompt, tag=session.keys.new_tag(), tokens=1)


def check_alike(session: Session) -> None:
    """Compare what engines that share nothing answer, each alone and behind the router."""
    first, *others = session.engines
    for length in lengths(session):
        prompt = session.fresh(length)
        with suppress(ApiError):
            reference = session.ask(first, prompt)
            for name in others:
                session.found.add_comparison(reference, session.ask(name, prompt))
    _reach(session)
    same = session.found
    session.report(f"{same.compared} answers of all engines compared, {same.mismatched} differ")


def _reach(session: Session) -> None:
    """Send prompts at once, until the router has used every engine."""
    idle, first, length = set(session.engines), session.engines[0], lengths(session)[-1]
    for _ in range(_REACH_ATTEMPTS):
        prompts = [session.fresh(length) for _ in range(2 * len(session.engines))]
        finished, before = _finished(session), session.reading()
        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(partial(session.ask, session.front), prompts))
            session.counted_since(before)
            idle -= {name for name, count in _finished(session).items() if count > finished[name]}
            for prompt, answer in zip(prompts, answers, strict=True):
                session.found.add_comparison(session.ask(first, prompt), answer, batched=True)
        except ApiError:
            return  # already recorded as a failure
        if not idle:
            break
    session.found.unreached.update(idle)


def _finished(session: Session) -> dict[str, int]:
    return {name: session.finished([name]) for name in session.engines}
