"""A real stack whose Redis path has no checksum, and the check's own prompts on it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from bench.check_power.damage import KINDS, Damage
from bench.check_power.layout import WORDS, Layout, Shape, learn
from bench.check_power.vandal import payloads, vandal
from deploy.runtime.home import Home
from deploy.verify.equivalence import Noise
from deploy.verify.findings import Findings, failures
from deploy.workflows.check import CheckOptions, check_stack
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.check.probes import check_pair, lengths, measure_noise
from deploy.workflows.check.session import Session
from deploy.workflows.key_cleanup import mark
from deploy.workflows.running import RunningStack, require_stack

_STORED_S, _POLL_S = 20.0, 0.005


@dataclass(frozen=True)
class CheckResult:
    """What the check found in a trial: nothing is a sound stack; the largest difference."""

    failures: Sequence[str]
    max_logprob_diff: float


class Bench:
    """A running stack, the layout of its chunks, and a chunk of a prompt that went before."""

    heads_first = True  # in a stored chunk

    def __init__(self, home: Home, name: str, store: redis.Redis) -> None:
        self.home, self.name, self.store = home, name, store
        self.running: RunningStack = require_stack(home, name)
        plan = self.running.prepared.plan
        self.pair = plan.producers[0].name, plan.consumers[0].name
        self.producer = self.running.stack.service(self.pair[0])
        self.model = plan.model.served_name
        blocks = plan.chunk_size // plan.block_size
        model = plan.model.shape
        if model is None:
            raise ValueError(f"config.json of {plan.model.ref} does not say its layers and heads")
        sizes = model.layers, blocks, model.kv_heads, plan.block_size, model.head_dim
        shape = Shape(*sizes, heads_first=self.heads_first, word=WORDS[plan.dtype])
        self.layout: Layout = learn(self.chunk_of, shape)
        self.foreign = self.chunk_of([ord("z")] * shape.tokens)
        self.noise = measured_noise(self.running, self.pair)

    def trial(self, kind: str, seed: str) -> CheckResult:
        """Damage the first prompt of a pair's check, and return what the check found.

        Raises:
            RuntimeError: there was nothing to damage, or somebody had read it before.
        """
        rng = random.Random(f"{seed}/0")  # noqa: S311 - no secret
        found, self.foreign = self.checked_pair(KINDS[kind].damage, rng)
        return found

    def healthy(self) -> CheckResult:
        """Return what a whole check finds without damage."""
        report = check_stack(self.home, self.name, lambda _: None, CheckOptions())
        return CheckResult(report.failures, report.equivalence.max_logprob_diff)

    def checked_pair(self, damage: Damage, rng: random.Random) -> tuple[CheckResult, bytes]:
        """Do what a check does for one pair, with a vandal at its first prompt.

        Returns:
            What the check found; and a chunk of the prompt, before the damage.
        """
        keys = CheckKeys(tagged=True)
        first = f"{mark(keys.run)}-1-"
        with Session(self.running, keys, lambda _: None) as session:
            session.found.noise = self.noise
            before = session.reading()
            chunks = lengths(session)[0] // session.chunk
            work = damage, self.foreign, self.layout, rng
            with vandal(self.store, first, chunks, work) as loot:
                check_pair(session, *self.pair)
            session.found.counted = session.counted_since(before)
            keys.remove(session.store)
        if not loot or not loot[0].in_time:
            raise RuntimeError("no chunk was damaged before its load")
        return seen(session.found), loot[0].first_chunk

    def chunk_of(self, prompt: Sequence[int]) -> bytes:
        """Have the producer store a prompt of one chunk; return its bytes, and remove them."""
        keys = CheckKeys(tagged=True)
        tag = keys.new_tag()
        with self.running.api(self.producer) as api:
            api.complete(self.model, prompt, max_tokens=1, tag=tag)
        until = time.monotonic() + _STORED_S
        while not (found := payloads(self.store, mark(tag))):
            if time.monotonic() > until:
                raise RuntimeError("the producer does not store its chunk")
            time.sleep(_POLL_S)
        value = self.store.get(found[0])
        for key in self.store.scan_iter(match=f"*{mark(tag)}*"):
            self.store.unlink(key)
        return value


def measured_noise(running: RunningStack, pair: tuple[str, str]) -> Noise:
    """Return how far engines are from their own answers, for many trials.

    Not in each: what was damaged stays in the engines' memory, and would look like noise.
    """
    with Session(running, CheckKeys(tagged=False), lambda _: None) as session:
        measure_noise(session, pair)
        return session.found.noise


def seen(found: Findings) -> CheckResult:
    """Return what a check would say of its findings."""
    said = [failure.sentence for failure in failures(found, [], store_answers=True)]
    return CheckResult(said, found.max_logprob_diff)
