"""One check from its beginning to its report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from deploy.errors import StackUnhealthy, UsageError
from deploy.metrics.connector import ConnectorReport
from deploy.metrics.page import MetricsPage
from deploy.planning.memory import ANSWER_TOKENS
from deploy.planning.pairs import named_pairs
from deploy.runtime.engine_api import ApiError
from deploy.runtime.home import Home
from deploy.stack.lmcache_server import HEARTBEAT_S
from deploy.stack.service import Service
from deploy.verify.diagnosis import diagnose
from deploy.verify.diagnosis.engine_causes import rows_apart
from deploy.verify.findings import failures
from deploy.verify.report import CheckReport
from deploy.workflows.check.aggregated import check_alike, check_shared_turns, check_spread
from deploy.workflows.check.canaries import Aviary
from deploy.workflows.check.keys import CheckKeys, guarded
from deploy.workflows.check.probes import (
    LEFT_OUT,
    check_decode_reuse,
    check_own_prompt,
    check_pair,
    check_second_tier,
    lengths,
    measure_noise,
)
from deploy.workflows.check.routed import check_burst, check_router, check_turns
from deploy.workflows.check.session import Session
from deploy.workflows.evidence import (
    LAYERWISE_TAGS,
    Readings,
    engine_health,
    gather_evidence,
    is_running,
    service_starts,
    store_use,
    tags_are_kept,
)
from deploy.workflows.prepare import Report
from deploy.workflows.running import (
    RunningStack,
    kv_server_page,
    require_running,
    require_stack,
    store_of,
)

_DYING_S = 5.0
_ANSWER_WITHIN_S, _ANSWER_POLL_S = 10.0, 0.1
_RENEWALS = 5
_ALL_PAIRS = ("*:*",)
_UNTAGGED = (
    f"warning: not every engine has fix {LAYERWISE_TAGS} applied, without which layerwise KV has "
    "no tags: the check's keys cannot be told from others, and stay until they are evicted"
)


@dataclass(frozen=True)
class CheckOptions:
    """What is checked, and the hit rate that must be reached.

    Attributes:
        pairs: patterns such as 'producer-0:*'; those that no pattern names are left out.
        quick: only the pairs, with fewer questions, and the router.
        least: the eligible hit rate that must be reached, 0 to 1; 1 means exactly what is eligible.
        prompt: a text of the user that is sent, too; None without one.
    """

    pairs: Sequence[str] = _ALL_PAIRS
    quick: bool = False
    least: float = 1.0
    prompt: str | None = None


def check_stack(
    home: Home, name: str, report: Report, options: CheckOptions | None = None
) -> CheckReport:
    """Check a running stack. The caller holds its lock, so that it stays as it is.

    The keys that the check stores are removed at its end, however it ends.

    Raises:
        StateError: there is no such stack, or its router is on another host.
        UsageError: the options name no pair of it, or its model has no room for their prompt.
        StackUnhealthy: a service of it does not run or does not answer, so nothing can be checked.
    """
    return check_running(home, require_stack(home, name), report, options or CheckOptions())


def check_running(
    home: Home | None, running: RunningStack, report: Report, options: CheckOptions
) -> CheckReport:
    """Check a stack as `check_stack` does; `home` is None if another machine runs it."""
    if not running.stack.has_front:
        raise running.stack.no_front()
    choose = _chosen if running.prepared.plan.shares_kv else _none
    pairs = choose(running, options)
    require_running(running)
    require_answers(running)
    with open_session(home, running, report) as session:
        return _checked(session, pairs, options, _aviary(home, session))


@contextmanager
def open_session(home: Home | None, running: RunningStack, report: Report) -> Iterator[Session]:
    """Open a check's session with a stack, and clean up its keys.

    Raises:
        StackUnhealthy: it stopped answering.
    """
    uses_redis = running.prepared.plan.uses_redis
    tagged = uses_redis and tags_are_kept(running)
    if uses_redis and not tagged:
        report(_UNTAGGED)
    keys = CheckKeys(tagged=tagged)
    name = running.stack.name
    try:
        with guarded(home, running, keys.run), Session(running, keys, report) as session:
            yield session
    except ApiError as exc:
        raise StackUnhealthy(
            f"the stack stopped answering during the check: {exc}",
            hint=f"deploy up --resume --name {name}",
        ) from exc


def _aviary(home: Home | None, session: Session) -> Aviary | None:
    """Return the canaries of a stack that shares KV; None where they could not be removed again."""
    running = session.running
    plan = running.prepared.plan
    untagged = plan.uses_redis and not session.keys.tagged
    if home is None or not plan.shares_kv or untagged:
        return None
    return Aviary.of(running, home.canaries_file(running.stack.name), session.report)


def _none(running: RunningStack, options: CheckOptions) -> list[tuple[str, str]]:
    """Return no pairs, for engines that share no KV.

    Raises:
        UsageError: an option needs engines that share KV.
    """
    for option, given in (
        ("--pairs", tuple(options.pairs) != _ALL_PAIRS),
        ("--prompt-file", options.prompt is not None),
    ):
        if given:
            raise UsageError(
                f"{option}: the engines of {running.prepared.plan.topology} share no KV",
                hint="deploy check",
            )
    return []


def _chosen(running: RunningStack, options: CheckOptions) -> list[tuple[str, str]]:
    """Return the pairs that are to be checked."""
    every = {":".join(pair): pair for pair in running.prepared.plan.pairs}
    hint = f"deploy check --pairs '{next(iter(every.values()))[0]}:*'"
    return named_pairs(every, options.pairs, hint=hint)


def _checked(
    session: Session,
    pairs: Sequence[tuple[str, str]],
    options: CheckOptions,
    aviary: Aviary | None,
) -> CheckReport:
    began = time.monotonic()
    running, found = session.running, session.found
    own = _own_prompt(session, options)
    before, pages, starts = session.store.stats(), _pages(session), service_starts(running)
    began_at = session.reading()
    try:
        _send(session, pairs, options, own, aviary)
        found.others = session.counted_since(began_at).others
    except ApiError:
        # A dead engine is a finding; the rest is still examined.
        if not _await_deaths(running, starts):
            raise
    seen = Readings(before, session.store.stats(), pages, _pages(session))
    for line in _unplanned(seen.pages_after, running.stack.name):
        session.report(line)
    found.path = seen.path
    found.ended, found.restarted = _deaths(running, starts)
    engines = engine_health(running)
    plan = running.prepared.plan
    shares_kv, uses_redis = plan.shares_kv, plan.uses_redis
    store_answers = seen.store_answered if uses_redis else None
    failed = list(failures(found, engines, store_answers=store_answers, least=options.least))
    causes = []
    # All causes are about shared KV.
    if shares_kv and (failed or any(prompt.hidden for prompt in found.prompts)):
        said = [failure.sentence for failure in failed]
        causes = diagnose(gather_evidence(running, found, seen, session.store, said))
    store = store_use(seen, session.keys.remove(session.store)) if uses_redis else None
    if aviary:
        if not failed and pairs:
            aviary.leave(session, pairs)
        aviary.close(session)
    return CheckReport(
        pairs=found.pairs,
        race=found.race,
        equivalence=found.equivalence,
        store=store,
        path=found.path,
        engines=engines,
        failed=failed,
        diagnosis=causes,
        seconds=time.monotonic() - began,
        turns=found.turns,
        decode_reuse=found.decode_reuse,
        second_tier=found.second_tier,
        burst=found.burst,
        counted=found.counted,
        vllm=session.version,
        others=found.others,
        prompts=found.prompts,
        left_out=LEFT_OUT if plan.kv_server else (),
        canaries=found.canaries,
    )


def _unplanned(pages: Mapping[str, MetricsPage], name: str) -> Iterator[str]:
    """Yield differences from the plan that all engines share; others fail the check."""
    reports = {engine: ConnectorReport.read(page).kv for engine, page in pages.items()}
    for one in rows_apart(reports):
        if one.alike:
            yield (
                f"warning: the engines do not run what was planned, and find no KV that was stored "
                f"as planned: {one.text}; try: deploy down --name {name}, then "
                f"deploy up --name {name}"
            )


def _own_prompt(session: Session, options: CheckOptions) -> list[int] | None:
    """Return the tokens of the user's own prompt."""
    if options.prompt is None:
        return None
    tokens = session.tokenized(options.prompt)
    if not tokens or len(tokens) + ANSWER_TOKENS > session.limit:
        raise UsageError(
            f"--prompt-file: {len(tokens)} tokens and an answer of {ANSWER_TOKENS} do not fit the "
            f"model's context of {session.limit}"
            if tokens
            else "--prompt-file: the file is empty",
            hint="shorten the prompt" if tokens else "write a prompt into the file",
        )
    return tokens


def _own(session: Session, pairs: Sequence[tuple[str, str]], prompt: list[int] | None) -> None:
    """Send the user's own prompt to each consumer once; then it is in the consumer's cache."""
    if prompt is None:
        return
    for consumer in dict.fromkeys(consumer for _, consumer in pairs):
        producer = next(producer for producer, of in pairs if of == consumer)
        check_own_prompt(session, producer, consumer, prompt)


def _deaths(running: RunningStack, starts: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the engines that ended, and those that were restarted, since these starts."""
    now = service_starts(running)
    other = [name for name, since in starts.items() if now.get(name) != since]
    ended = [name for name in starts if not is_running(running, name)]
    return ended, [name for name in other if name not in ended]


def _await_deaths(running: RunningStack, starts: Mapping[str, str]) -> bool:
    """Tell whether a service is about to end: its processes do so one after the other."""
    deadline = time.monotonic() + _DYING_S
    while not any(_deaths(running, starts)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _pages(session: Session) -> dict[str, MetricsPage]:
    return {**session.pages(), **kv_server_page(session.running)}


def _send(
    session: Session,
    pairs: Sequence[tuple[str, str]],
    options: CheckOptions,
    own: list[int] | None,
    aviary: Aviary | None,
) -> None:
    """Send all prompts, if there can be one with a chunk."""
    if not lengths(session):
        session.found.too_short = (
            f"the model's context of {session.limit} tokens has no room for a chunk of "
            f"{session.chunk} tokens and an answer, so no KV is ever reused"
        )
        return
    _own(session, pairs, own)
    _probe(session, pairs, options, aviary)


def _probe(
    session: Session,
    pairs: Sequence[tuple[str, str]],
    options: CheckOptions,
    aviary: Aviary | None,
) -> None:
    """Send the check's prompts; vLLM's counters are read around those of pairs alone."""
    plan = session.running.prepared.plan
    if not plan.shares_kv:
        measure_noise(session, session.engines, quick=options.quick)
        check_alike(session)
        return
    measure_noise(session, sorted({name for pair in pairs for name in pair}), quick=options.quick)
    if aviary and pairs:
        aviary.look(session, pairs)
    before = session.reading()
    for producer, consumer in pairs:
        check_pair(session, producer, consumer, quick=options.quick)
    session.found.counted = session.counted_since(before)
    (check_spread if plan.aggregated else check_router)(session)
    if options.quick:
        return
    if session.found.nothing_loaded and not session.is_given_up(session.front):
        # Nothing is loaded at all: each further probe would only wait for its timeout.
        session.found.leave_out("no pair loads anything")
        return
    (check_shared_turns if plan.aggregated else check_turns)(session)
    if plan.save_decode_cache:
        check_decode_reuse(session)
    if plan.kv_server:
        check_second_tier(session)
    check_burst(session)


def require_answers(running: RunningStack) -> None:
    """Check that all that serve requests answer; the router may need time to notice a return.

    Raises:
        StackUnhealthy: naming those that do not.
    """
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    watching = running.stack.monitoring
    silent = [service for service in running.stack.every if service not in watching]
    while silent := [service for service in silent if not _answers(running, service)]:
        if time.monotonic() > deadline:
            names = [service.name for service in silent]
            raise StackUnhealthy(
                f"not answering: {', '.join(names)}", hint=running.hint_on(silent[0])
            )
        time.sleep(_ANSWER_POLL_S)


def _answers(running: RunningStack, service: Service) -> bool:
    """Tell whether a service answers; an error of Redis is an answer, which the check reports."""
    if running.is_ready(service):
        return True
    if service.role != "redis":
        return False
    with store_of(running) as store:
        return store.refusal() is not None


def renew_store_connections(home: Home, running: RunningStack) -> None:
    """Send throw-away prompts until engines that outlived their Redis use the new one.

    An engine notices a dead connection by the request that fails on it. Where another host has the
    router, it is left to find it by itself.

    Raises:
        StackUnhealthy: the stack stopped answering.
    """
    if not running.stack.has_front:
        return
    # An engine that lost LMCache's server comes back to it with a ping.
    pause_s = HEARTBEAT_S if running.prepared.plan.kv_server else 0
    with open_session(home, running, lambda _: None) as session:
        for attempt, length in enumerate(lengths(session)[:1] * _RENEWALS):
            time.sleep(pause_s if attempt else 0)
            prompt, tag = session.fresh(length), session.keys.new_tag()
            found = 0
            for name in session.engines:
                with suppress(ApiError):
                    cached = session.ask(name, prompt, tag=tag).cached_tokens
                    found += name in session.consumers and cached > 0
            if found == len(session.consumers):
                break
        session.keys.remove(session.store)
