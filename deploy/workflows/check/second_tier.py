"""The probe of Redis as the second tier of LMCache's server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.verify.hits import Phase
from deploy.workflows.check.keys import key_name
from deploy.workflows.check.probes import hits_of, lengths, said
from deploy.workflows.check.session import Session
from deploy.workflows.running import RunningStack

LEFT_OUT = (
    "the number of keys in Redis, because LMCache's server stores them; what the check stores "
    "stays until it is evicted",
)
# The server stores behind the producer's answer.
_STORED_WITHIN_S = 10.0
_POLL_S = 0.05


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
            time.sleep(_POLL_S)
    return True
