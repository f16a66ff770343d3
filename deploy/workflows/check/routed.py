"""Probes that go through the router: single prompts, a conversation, many users at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError
from deploy.verify.equivalence import Completion
from deploy.verify.hits import Hits, Phase, eligible_tokens
from deploy.workflows.check.probes import held, hits_of, lengths, said, token_ids
from deploy.workflows.check.session import ANSWER_TIMEOUT_S, USERS, Session

_SILENT_ROUTER = "the router did not answer in time"
ROUTER_PROMPTS = 2
ATTEMPTS = 3  # if other clients' requests moved the counters, too
TURNS = 3
# Requests of a burst wait for each other, above all with a real model on CPUs.
_BURST_TIMEOUT_S = 4 * ANSWER_TIMEOUT_S


def check_router(session: Session) -> None:
    """Send prompts through the router, which decodes the moment its prefill answers.

    An answer does not say what its producer did, so the engines' counters are read. If other
    clients' requests moved them, the prompt is repeated.
    """
    found = session.found
    producers = itertools.cycle(session.producers)
    for length in lengths(session)[:1] * ROUTER_PROMPTS:
        for _ in range(ATTEMPTS):
            phase = _routed(session, length, next(producers))
            if not phase.blurred:
                break
        found.race += phase
    session.report(f"through the router: {said(found.race.hits)}")


def _routed(session: Session, length: int, producer: str) -> Phase:
    prompt = session.fresh(length)
    try:
        reference = session.computed(producer, prompt, session.keys.new_tag())
        prefilled, before = session.finished(session.producers), session.reading()
        answer = session.ask(session.front, prompt)
    except ApiError:
        return Phase(hits_of(session, length, 0), 1, 1)
    counted = session.counted_since(before)
    if not counted.hits and session.finished(session.producers) == prefilled:
        session.found.bypassed += 1
    session.found.add_comparison(reference, answer)
    return Phase(hits_of(session, length, counted.hits), 1, blurred=counted.others > 0)


def last_turn(session: Session) -> int | None:
    """Return the length of a conversation's last prompt; None (and the reason) if none fits."""
    chunk = session.chunk
    grown = chunk + chunk // 3 + (TURNS - 1) * (ANSWER_TOKENS + 3 * chunk // 4)
    # The last answer must not complete a chunk, whose key would not be removed.
    last = grown + (chunk // 4 - grown) % chunk
    if last + ANSWER_TOKENS > session.limit:
        session.found.turns = Phase(skipped=f"the model's context has {session.limit} tokens")
        return None
    if session.is_given_up(session.front):
        session.found.turns = Phase(skipped=_SILENT_ROUTER)
        return None
    return last


def check_turns(session: Session) -> None:
    """Hold a conversation through the router: each turn's prompt has all that was said before."""
    chunk, last = session.chunk, last_turn(session)
    if last is None:
        return
    try:
        turns = list(conversation(session, last))
        session.ask(session.producers[0], turns[-1][0], tag=session.keys.new_tag(), tokens=1)
    except ApiError:
        session.found.turns = Phase(requests=TURNS, failed=TURNS)
        return
    phase = Phase()
    for prompt, reference in turns:
        before = session.reading()
        try:
            answer = session.ask(session.front, prompt)
        except ApiError:
            phase += Phase(hits_of(session, len(prompt), 0), 1, 1)
            continue
        counted = session.counted_since(before)
        eligible = eligible_tokens(len(prompt), chunk)
        hits = Hits(len(prompt), held(counted, eligible), eligible)
        phase += Phase(hits, 1, blurred=counted.others > 0)
        session.found.add_comparison(reference, answer)
    session.found.turns = phase
    session.report(f"a conversation of {TURNS} turns: {said(phase.hits)}")


def conversation(session: Session, last: int) -> Iterator[tuple[list[int], Completion]]:
    """Yield every turn's prompt with a reference answer, whose KV is not shared."""
    chunk, salt = session.chunk, session.keys.new_salt()
    prompt = session.fresh(chunk + chunk // 3)
    for turn in range(TURNS):
        answer = session.ask(session.producers[0], prompt, salt=salt)
        yield prompt, answer
        said = [*prompt, *token_ids(answer)]
        wanted = last if turn == TURNS - 2 else len(said) + 3 * chunk // 4
        prompt = [*said, *session.fresh(max(1, wanted - len(said)))]


def check_burst(session: Session) -> None:
    """Have several users hold conversations at once, through the router."""
    chunk = session.chunk
    first, second = chunk + chunk // 3, 2 * chunk + chunk // 4
    if second + ANSWER_TOKENS > session.limit:
        session.found.burst = Phase(skipped=f"the model's context has {session.limit} tokens")
        return
    if session.is_given_up(session.front):
        session.found.burst = Phase(skipped=_SILENT_ROUTER)
        return
    asked = [session.fresh(second) for _ in range(USERS)]
    tags = [session.keys.new_tag() for _ in asked]
    try:
        patience = _BURST_TIMEOUT_S if session.at_once > 1 else None
        computed = partial(session.computed, timeout_s=patience)
        references = list(session.each(computed, itertools.cycle(session.producers), asked, tags))
    except ApiError:
        session.found.burst = Phase(requests=2 * USERS, failed=2 * USERS)
        return

    def user(prompt: list[int]) -> list[Completion | None]:
        answers: list[Completion | None] = []
        for length in (first, second):
            try:
                part = prompt[:length]
                answers.append(session.ask(session.front, part, timeout_s=_BURST_TIMEOUT_S))
            except ApiError:
                answers.append(None)
        return answers

    before = session.reading()
    with ThreadPoolExecutor(USERS) as pool:
        answers = list(pool.map(user, asked))
    counted = session.counted_since(before)
    for reference, (_, answer) in zip(references, answers, strict=True):
        if answer is not None:
            session.found.add_comparison(reference, answer)
    failed = sum(answer is None for of_user in answers for answer in of_user)
    # Aggregated engines load nothing for a new prompt.
    reused = (first,) if session.running.prepared.plan.aggregated else (first, second)
    eligible = USERS * sum(eligible_tokens(length, chunk) for length in reused)
    burst = Phase(
        Hits(USERS * (first + second), held(counted, eligible), eligible),
        2 * USERS,
        failed,
        blurred=counted.others > 0,
    )
    session.found.burst = burst
    session.report(f"{USERS} users at once: {burst.failed} of {burst.requests} requests failed")
