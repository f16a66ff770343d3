"""One check from its beginning to its report."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deploy.errors import StackUnhealthy, UsageError
from deploy.runtime.engine_api import ApiError
from deploy.runtime.home import Home
from deploy.verify.diagnosis import diagnose
from deploy.verify.findings import failures
from deploy.verify.report import CheckReport
from deploy.verify.store_path import moved
from deploy.workflows.check.keys import CheckKeys, guarded
from deploy.workflows.check.probes import (
    check_burst,
    check_decode_reuse,
    check_pair,
    check_router,
    check_turns,
    lengths,
)
from deploy.workflows.check.session import Session, require_answers
from deploy.workflows.evidence import engine_health, gather_evidence, service_starts, store_use
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, require_running, require_stack

_RENEWALS = 5


@dataclass(frozen=True)
class CheckOptions:
    """What of a stack is checked, and what it must reach.

    Attributes:
        pairs: patterns such as 'producer-0:*'; those that no pattern names are left out.
        quick: only the pairs and the router.
        least: the eligible hit rate that must be reached, 0 to 1; 1 means exactly what is eligible.
    """

    pairs: Sequence[str] = ("*:*",)
    quick: bool = False
    least: float = 1.0


def check_stack(
    home: Home, name: str, report: Report, options: CheckOptions | None = None
) -> CheckReport:
    """Check a running stack. The caller holds its lock, so that it stays as it is.

    The keys that the check stores are removed at its end, however it ends.

    Raises:
        StateError: there is no such stack.
        UsageError: the options name no pair of it.
        StackUnhealthy: a service of it does not run or does not answer, so nothing can be checked.
    """
    options = options or CheckOptions()
    running = require_stack(home, name)
    pairs = _chosen(running, options.pairs)
    require_running(running)
    require_answers(running)
    try:
        with _session(home, running, report) as session:
            return _checked(session, pairs, options)
    except ApiError as exc:
        raise StackUnhealthy(
            f"the stack stopped answering during the check: {exc}",
            hint=f"deploy up --resume --name {name}",
        ) from exc


def renew_store_connections(home: Home, running: RunningStack) -> None:
    """Send throw-away prompts until engines that outlived their Redis have found the new one.

    An engine notices a dead connection by the request that fails on it.
    """
    with _session(home, running, lambda _: None) as session:
        for _ in range(_RENEWALS):
            prompt, tag = session.fresh(lengths(session)[0]), session.keys.new_tag()
            found = 0
            for name in session.engines:
                with contextlib.suppress(ApiError):
                    cached = session.ask(name, prompt, tag=tag).cached_tokens
                    found += name in session.consumers and cached > 0
            if found == len(session.consumers):
                break
        session.keys.remove(session.store)


@contextmanager
def _session(home: Home, running: RunningStack, report: Report) -> Iterator[Session]:
    keys = CheckKeys()
    with guarded(home, running.stack.name, keys.run), Session(running, keys, report) as session:
        yield session


def _chosen(running: RunningStack, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs that are to be checked."""
    plan = running.prepared.plan
    every = [(p.name, c.name) for p in plan.producers for c in plan.consumers]
    for pattern in patterns:
        if not fnmatch.filter([":".join(pair) for pair in every], pattern):
            raise UsageError(
                f"--pairs {pattern}: there is no such pair; there are: "
                + ", ".join(":".join(pair) for pair in every),
                hint=f"deploy check --pairs '{plan.producers[0].name}:*'",
            )
    return [
        pair
        for pair in every
        if any(fnmatch.fnmatchcase(":".join(pair), pattern) for pattern in patterns)
    ]


def _checked(
    session: Session, pairs: Sequence[tuple[str, str]], options: CheckOptions
) -> CheckReport:
    began = time.monotonic()
    running, found = session.running, session.found
    before, path, starts = session.store.stats(), session.store_paths(), service_starts(running)
    began_at = session.reading()
    if lengths(session):
        _probe(session, pairs, options)
    else:
        found.too_short = (
            f"the model's context of {session.limit} tokens has no room for a chunk of "
            f"{session.chunk} tokens and an answer, so no KV is ever shared"
        )
    after = session.store.stats()
    found.path = moved(path, session.store_paths())
    found.others = session.counted_since(began_at).others
    now = service_starts(running)
    found.restarted = [name for name, since in starts.items() if now.get(name) != since]
    engines = engine_health(running)
    failed = list(
        failures(found, engines, store_answers=None not in (before, after), least=options.least)
    )
    # Only a failure is worth reading the engines' whole logs for.
    causes = diagnose(gather_evidence(running, found, before, after)) if failed else []
    return CheckReport(
        pairs=found.pairs,
        race=found.race,
        equivalence=found.equivalence,
        store=store_use(before, after, session.keys.remove(session.store)),
        path=found.path,
        engines=engines,
        failed=failed,
        diagnosis=causes,
        seconds=time.monotonic() - began,
        turns=found.turns,
        decode_reuse=found.decode_reuse,
        burst=found.burst,
        counted=found.counted,
        vllm=session.version,
        others=found.others,
    )


def _probe(session: Session, pairs: Sequence[tuple[str, str]], options: CheckOptions) -> None:
    """Send the prompts; what vLLM counts is looked at while nothing but pairs is asked."""
    before = session.reading()
    for producer, consumer in pairs:
        check_pair(session, producer, consumer)
    session.found.counted = session.counted_since(before)
    check_router(session)
    if options.quick:
        return
    check_turns(session)
    if session.running.prepared.plan.save_decode_cache:
        check_decode_reuse(session)
    check_burst(session)
