"""Both connectors on stacks of the same shape, side by side, in turns.

Two stacks of the wide model are up at once: one shares KV by LMCache inside the engines and Redis,
the other by LMCache's server with Redis as its second tier. A decode is sent as soon as its prefill
answers. With the server a second prompt is loaded from Redis alone, as `deploy check` does it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from bench.kit import family_cpu_s, store_of
from bench.redis_path import page
from bench.redis_path.contender import CHUNK
from bench.redis_path.report import Target, target_table
from bench.redis_path.running_stack import (
    Engine,
    await_stored,
    engines,
    folder_with_model,
    prompt,
    stack_in,
)
from bench.redis_path.side_by_side import Turn, Turns, ratios, table, take_turns
from bench.redis_path.stack import PROMPT_TOKENS
from bench.redis_path.wide_model import BYTES_A_TOKEN
from deploy.config.fields import Connector
from deploy.runtime.home import Home
from deploy.verify.hits import eligible_tokens
from deploy.workflows.check.probes import drop_from_memory
from deploy.workflows.running import RunningStack, require_stack

_ELIGIBLE = eligible_tokens(PROMPT_TOKENS, CHUNK)
_REST = PROMPT_TOKENS - _ELIGIBLE
_LOADED_GB = _ELIGIBLE * BYTES_A_TOKEN / 1e9
# What is measured → what the page calls it.
_SHOWN = {
    "prefill_s": "prefill's answer, s",
    "decode_s": "decode's first token, KV loaded, s",
    "own_s": "the same from the engine's own prefix cache, s",
    "moved_s": "the difference: moving KV, s",
    "decode_cpu_s_gb": "CPU of the stack for it, s per GB loaded",
    "redis_s": "decode's first token, from Redis alone, s",
}
BOTH = ("lmcache", "lmcache-mp")


@dataclass(frozen=True)
class Side:
    """One of the two stacks; its connector is its name."""

    name: Connector
    producer: Engine
    consumer: Engine
    store: redis.Redis
    running: RunningStack

    @property
    def has_server(self) -> bool:
        return self.running.prepared.plan.kv_server is not None

    def turn(self, number: int) -> Turn:
        """Prefill a prompt that is new and decode it twice; with the server, then another."""
        seed = 10_000 * len(self.name) + 3 * number
        asked, before = prompt(PROMPT_TOKENS, seed), self.consumer.hits()
        found: Turn = {"prefill_s": self.producer.ask(asked)}
        cpu_s = self._cpu_s()
        found["decode_s"] = self.consumer.ask(asked)
        found["decode_cpu_s_gb"] = (self._cpu_s() - cpu_s) / _LOADED_GB
        found["hits"] = self.consumer.hits() - before
        # With another end, so that as many tokens are computed as after a load.
        found["own_s"] = self.consumer.ask([*asked[:_ELIGIBLE], *prompt(_REST, seed + 2)])
        found["moved_s"] = found["decode_s"] - found["own_s"]
        self._clean(asked)
        if self.has_server:
            other = prompt(PROMPT_TOKENS, seed + 1)
            self.producer.ask(other)
            self._forget(other)
            found["redis_s"] = self.consumer.ask(other)
            found["redis_hits"] = self.consumer.hits() - before - found["hits"]
            self._clean(other)
        return found

    def memory_gib(self) -> float:
        """Return the memory of all processes, with what they share counted once."""
        parents = [psutil.Process(one.pid) for one in self.running.state.services.values()]
        each = [one for p in parents for one in (p, *p.children(recursive=True))]
        return float(sum(one.memory_full_info().pss for one in each)) / 2**30

    def _clean(self, asked: Sequence[int]) -> None:
        """Leave nothing of a prompt, so that no turn pays for another one's eviction."""
        await_stored(self.store)
        if self.has_server:
            self._forget(asked)
        self.store.flushall()

    def _forget(self, asked: Sequence[int]) -> None:
        if not drop_from_memory(self.running, asked):
            raise RuntimeError("Redis does not get a prompt's KV in time")

    def _cpu_s(self) -> float:
        return sum(family_cpu_s(one.pid) for one in self.running.state.services.values())


def run(rounds: int, *, as_json: bool, results: Path | None) -> None:
    """Measure, and print what was found."""
    with _two_stacks() as sides:
        found = take_turns(sides, rounds)
        memory = {side.name: side.memory_gib() for side in sides}
    targets = judge(found)
    if results:
        text = page.connectors_page(_table(found, memory), targets, rounds)
        results.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({**found, "memory_gib": memory}))
        return
    print(f"{_table(found, memory)}\n\n{target_table(targets)}")


def judge(found: Turns) -> list[Target]:
    """Return what must hold: every eligible token, and half the time to the first token."""
    whole = f"{_ELIGIBLE:,} tokens"
    kinds = (
        ("lmcache", "hits", "lmcache, no gap"),
        ("lmcache-mp", "hits", "lmcache-mp, no gap"),
        ("lmcache-mp", "redis_hits", "lmcache-mp, from Redis alone"),
    )
    fewest = [(what, min(turn[name] for turn in found[side])) for side, name, what in kinds]
    ratio = statistics.median(ratios(found, *BOTH, "decode_s"))
    return [
        *(Target(f"loaded, {what}", whole, f"{n:,.0f}", n == _ELIGIBLE) for what, n in fewest),
        Target("first token, lmcache-mp / lmcache", "<= 0.50", f"{ratio:.2f}", ratio <= 0.5),
    ]


def _table(found: Turns, memory: dict[str, float]) -> str:
    inside, server = (f"{memory[name]:.2f}" for name in BOTH)
    row = f"| memory of all processes, GiB | {inside} | {server} | | |"
    return f"{table(found, *BOTH, _SHOWN)}\n{row}"


@contextlib.contextmanager
def _two_stacks() -> Iterator[tuple[Side, Side]]:
    with (
        folder_with_model() as (folder, model),
        _stack(folder, model, "lmcache", {"staging_gib": 0.5}) as inside,
        _stack(folder, model, "lmcache-mp", {"server_gib": 1}) as server,
    ):
        yield inside, server


@contextlib.contextmanager
def _stack(
    folder: Path, model: Path, connector: Connector, lmcache: dict[str, Any]
) -> Iterator[Side]:
    spec = {
        "name": connector, "connector": connector, "lmcache": lmcache,
        "engine": {"kv_cache_gib": 0.6}, "redis": {"memory_gib": 1, "shards": 1},
    }  # fmt: skip
    with stack_in(folder, model, **spec) as (files, port):
        producer, consumer = engines(files, port)
        running = require_stack(Home(folder, folder), connector)
        yield Side(connector, producer, consumer, store_of(files), running)
