"""The check looks back: it asks for the prompts of earlier checks, whose KV stays in the store.

Their record is a file, which outlives restarts, swaps and crashes as the KV does. It holds token
ids and log-probabilities of random prompts, and no key, secret or text of a user.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.metrics.engine import CacheCounters
from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError
from deploy.runtime.home import replace_private
from deploy.runtime.own_files import read_json
from deploy.verify.canaries import (
    Canary,
    CanaryFindings,
    Look,
    Present,
    as_record,
    from_record,
    judged,
    kept,
)
from deploy.verify.equivalence import Completion
from deploy.workflows.check.keys import key_name
from deploy.workflows.check.probes import counting
from deploy.workflows.check.session import ANSWER_TIMEOUT_S, BAD_REQUEST, Session
from deploy.workflows.key_cleanup import canary_of, mark
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack

# Of a check, canaries times consumers; it seldom happens that not each consumer sees each canary.
_MOST_LOOKS = 16


@dataclass
class Aviary:
    """A stack's canaries during one check.

    Attributes:
        file: their record.
        identity: of the KV that engines store now.
        canaries: those that are kept; the next check looks at them.
        gone: those whose keys, if any are left, are to be removed.
    """

    file: Path
    identity: str
    canaries: list[Canary]
    gone: list[Canary]

    @classmethod
    def of(cls, running: RunningStack, file: Path, report: Report) -> Aviary | None:
        """Return a stack's canaries; None if engines do not all store the same KV."""
        identity = identity_of(running)
        if not identity:
            return None
        now = time.time()
        recorded = recorded_canaries(file, report)
        expired = [one for one in recorded if one.is_expired(now)]
        return cls(file, identity, [one for one in recorded if one not in expired], expired)

    def look(self, session: Session, pairs: Sequence[tuple[str, str]]) -> None:
        """Have consumers load each canary's KV, and compare their answers with a fresh one."""
        consumers = list(dict.fromkeys(consumer for _, consumer in pairs))
        producers = list(dict.fromkeys(producer for producer, _ in pairs))
        each = max(1, _MOST_LOOKS // max(1, len(self.canaries)))
        offset = secrets.randbelow(len(consumers))
        asked = []
        for number, canary in enumerate(self.canaries):
            first = (offset + number * each) % len(consumers)
            chosen = [*consumers[first:], *consumers[:first]][:each]
            if not canary.may_be_loaded(self.identity):
                # A consumer that stores, too, stores it anew, and the next one would load that.
                chosen = chosen[:1]
            asked.append(Asked(canary, producers[(offset + number) % len(producers)], chosen))
        known = len(asked)
        if not self._note_looks():
            asked = [one for one in asked if one.canary.may_be_loaded(self.identity)]
        looks = list(look_at(session, asked, self.identity))
        session.found.canaries = CanaryFindings(
            known, looks, tolerance=session.found.noise.tolerance
        )
        for canary in list(self.canaries):
            outcomes = {look.outcome for look in looks if look.tag == canary.tag}
            # KV of another identity that is not found may be found again after a rollback. What is
            # found all the same fails this check, and not each one from now on.
            if outcomes == {"evicted"} or "foreign" in outcomes:
                self.canaries.remove(canary)
                self.gone.append(canary)

    def _note_looks(self) -> bool:
        """Record that engines may store canaries anew, before they do: a check may be interrupted.

        Returns:
            Whether it is recorded.
        """
        noted = [
            one
            if one.may_be_loaded(self.identity)
            else replace(one, looked_under=(*one.looked_under, self.identity))
            for one in self.canaries
        ]
        if noted == self.canaries:
            return True
        try:
            write_canaries(self.file, [*noted, *self.gone])
        except OSError:
            return False  # as when it is closed, which reports it
        self.canaries = noted
        return True

    def leave(self, session: Session, pairs: Sequence[tuple[str, str]]) -> None:
        """Have a producer compute a canary for later checks.

        Only a check that found nothing wrong does: what it left would not be KV to compare with.
        """
        producers = list(dict.fromkeys(producer for producer, _ in pairs))
        try:
            left = leave(session, secrets.choice(producers), self.identity)
        except ApiError:
            return
        if left is None:
            return
        self.canaries, over = kept([*self.canaries, left])
        self.gone += over
        if session.found.canaries:
            session.found.canaries = replace(session.found.canaries, left=True)

    def close(self, session: Session) -> None:
        """Write the record, and remove the keys of the canaries that are not in it any more."""
        for canary in self.gone:
            # Without tags here, it may still have one of before a swap of the connector.
            if session.keys.tagged or canary.identity != self.identity:
                session.store.remove_marked(mark(canary.tag))
        try:
            write_canaries(self.file, self.canaries)
        except OSError as exc:
            session.report(f"warning: canaries cannot be recorded in {self.file}: {exc.strerror}")
            if session.keys.tagged:
                session.store.remove_marked(mark(canary_of(session.keys.run)))
            if session.found.canaries:
                session.found.canaries = replace(session.found.canaries, left=False)


def leave(session: Session, producer: str, identity: str) -> Canary | None:
    """Have a producer compute and store a new prompt, and return it with its answer.

    None if the model's context has no room for a chunk, or if the prompt was not computed.

    Raises:
        ApiError: no answer.
    """
    chunk, room = session.chunk, session.limit - ANSWER_TOKENS
    if room < chunk:
        return None
    prompt = session.fresh(min(2 * chunk + chunk // 4, room))
    name = canary_of(session.keys.run)  # so that the clean-up finds it
    answer = session.ask(producer, prompt, tag=name if session.keys.tagged else "")
    if answer.cached_tokens:
        return None
    running = session.running
    vllm, lmcache = running.prepared.facts.versions
    model = running.prepared.plan.model.version
    return Canary(
        name, time.time(), identity, model, session.version or vllm or "", lmcache or "", producer,
        prompt, answer,
    )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A canary, the producer that computes it anew, and the consumers that load its KV."""

    canary: Canary
    producer: str
    consumers: Sequence[str]


def look_at(session: Session, asked: Sequence[Asked], identity: str) -> Iterator[Look]:
    """Have consumers load canaries' KV, and yield how each answers beside a fresh computation.

    Engines work side by side. A consumer answers one request at a time, as its counters show what
    it loaded. Of a prompt that the present model cannot have, nothing is yielded.
    """
    asked = [one for one in asked if len(one.canary.prompt) + ANSWER_TOKENS <= session.limit]
    consumers = {name for one in asked for name in one.consumers}
    at_once = {one.producer: session.at_once for one in asked} | dict.fromkeys(consumers, 1)
    turns = {name: ThreadPoolExecutor(count) for name, count in at_once.items()}
    with ExitStack() as stack:
        for pool in turns.values():
            stack.callback(pool.shutdown, cancel_futures=True)  # if the check is interrupted
        begun = [_begin(session, one, turns) for one in asked]
        for one, (computing, loading) in zip(asked, begun, strict=True):
            try:
                fresh = computing.result()
            except ApiError:
                continue  # tokens that this model does not have; or a dead engine, which is noted
            if fresh.cached_tokens:
                session.found.not_recomputed.add(one.producer)
                continue
            present = Present(identity, time.time(), session.found.noise.tolerance)
            for consumer, load in loading.items():
                try:
                    answer, counted = load.result()
                except ApiError as exc:
                    if exc.status == BAD_REQUEST:  # of a prompt that the producer took
                        session.found.failed.setdefault(consumer, str(exc))
                    yield Look(one.canary.tag, present.age_s(one.canary), consumer, "silent")
                    continue
                reused = counted.external_hits, counted.local_hits
                yield judged(
                    one.canary, present, consumer, fresh=fresh, answer=answer, reused=reused
                )


def _begin(
    session: Session, asked: Asked, turns: Mapping[str, ThreadPoolExecutor]
) -> tuple[Future[Completion], dict[str, Future[tuple[Completion, CacheCounters]]]]:
    """Have a producer compute a canary anew, and consumers load it."""
    prompt, tag = asked.canary.prompt, asked.canary.tag if session.keys.tagged else ""
    computing = turns[asked.producer].submit(
        session.ask, asked.producer, prompt, salt=session.keys.run, blames=False
    )
    loading = {
        name: turns[name].submit(counting, session, name, prompt, tag=tag, blames=False)
        for name in asked.consumers
    }
    return computing, loading


def recorded_canaries(file: Path, report: Report) -> list[Canary]:
    """Return the canaries of a record; what of it is damaged is left out, with a line."""
    try:
        found, damaged = from_record(read_json(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as exc:
        report(f"warning: the record of canaries is damaged and was started again: {file} ({exc})")
        return []
    if damaged:
        report(f"warning: {damaged} canaries of {file} are damaged and left out")
    return found


def write_canaries(file: Path, canaries: Sequence[Canary]) -> None:
    """Replace the record in one step; remove it if there are none.

    Raises:
        OSError: it cannot be written.
    """
    if not canaries:
        file.unlink(missing_ok=True)
        return
    replace_private(file, json.dumps(as_record(canaries)))


def identity_of(running: RunningStack) -> str:
    """Return what names KV in the keys of all engines: a seed, and their name of the model.

    The seed is the one that engines here really run with, not the plan's, since a newer kit may
    plan another one for engines that still run.

    Returns:
        "" if no engine here has a seed, or if engines differ or do not answer.
    """
    plan, launcher = running.prepared.plan, running.launcher
    records = [running.state.services.get(engine.name) for engine in plan.engines]
    seeds = [launcher.environment(one).get("PYTHONHASHSEED", "") for one in records if one]
    seed = next(filter(None, seeds), "")
    try:
        names = {
            key_name(running, engine.name, timeout_s=ANSWER_TIMEOUT_S)
            for engine in plan.all_engines
            if seed
        }
    except ApiError:
        return ""
    return f"{seed} {names.pop()}".strip() if len(names) == 1 else ""
