"""LMCache's own way to Redis and the kit's inside real engines, side by side, in turns.

Two stacks of the wide model are up at once. One has the kit's Redis path and all fixes; the other
is stock: LMCache's `redis://` connector, and of the fixes only the two without which no KV moves on
a CPU and the password is logged. What is told is LMCache's own log of each load, the first token of
the decode, and the CPU time of the consumer's processes while it was made.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bench.kit import ROOT, family_cpu_s, store_of
from bench.redis_path import page
from bench.redis_path.running_stack import (
    Engine,
    await_stored,
    engines,
    folder_with_model,
    prompt,
    stack_in,
)
from bench.redis_path.side_by_side import Turn, Turns, table, take_turns
from bench.redis_path.stack import PROMPT_TOKENS
from deploy.runtime.fixes import known_fixes
from deploy.verify.store_path import StorePath

NEEDED_ON_CPU = frozenset({"B15", "B17"})
# size, milliseconds and GiB/s of a load, as LMCache logs it.
_LOADED = re.compile(r"Retrieved (\d+) out of .*? cost ([\d.]+) ms, throughput: ([\d.]+) GB/s")
_GIB_IN_GB = 2**30 / 1e9
# What is measured → what the page calls it.
_SHOWN = {
    "gb_s": "load, GB/s, as LMCache logs it",
    "first_token_s": "decode's first token, s",
    "cpu_s": "CPU of the consumer for it, s",
}


@dataclass(frozen=True)
class Side:
    """One of the two stacks."""

    name: str
    producer: Engine
    consumer: Engine
    store: redis.Redis
    log: Path
    consumer_pid: int

    def turn(self, number: int) -> Turn:
        """Prefill a prompt that is new, and decode it once all of it is in Redis."""
        asked = prompt(PROMPT_TOKENS, 10_000 * (1 + len(self.name)) + number)
        self.producer.ask(asked)
        await_stored(self.store)
        seen, before = len(self._loads()), family_cpu_s(self.consumer_pid)
        first_token_s = self.consumer.ask(asked)
        cpu_s = family_cpu_s(self.consumer_pid) - before
        loads = self._loads()[seen:]
        if len(loads) != 1:
            raise RuntimeError(f"{self.name} loaded {len(loads)} times")
        self.store.flushall()
        return {"gb_s": loads[0] * _GIB_IN_GB, "first_token_s": first_token_s, "cpu_s": cpu_s}

    def _loads(self) -> list[float]:
        time.sleep(0.2)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return [float(rate) for _, _, rate in _LOADED.findall(text)]


def run(rounds: int, *, as_json: bool, results: Path | None) -> None:
    """Measure, and print what was found."""
    with _two_stacks() as sides:
        found = take_turns(sides, rounds)
        counted = sides[0].consumer.store_path()
    if results:
        text = page.clients_page(_table(found), rounds, _counted(counted))
        results.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({**found, "counted": counted.as_dict()}))
        return
    print(f"{_table(found)}\n\n{_counted(counted)}")


def _counted(path: StorePath) -> str:
    return (
        f"By its own counters the consumer's Redis path loaded {path.loaded_bytes / 1e9:.2f} GB at "
        f"{path.load_gb_s:.2f} GB/s and looked up in {path.lookup_ms:.2f} ms; {path.refused:.0f} "
        f"chunks were refused, {path.not_loaded:.0f} not loaded, {path.failures:.0f} calls failed."
    )


def _table(found: Turns) -> str:
    return table(found, "stock", "ours", _SHOWN)


@contextlib.contextmanager
def _two_stacks() -> Iterator[tuple[Side, Side]]:
    off = sorted(set(known_fixes(ROOT / "deploy" / "connector")) - NEEDED_ON_CPU)
    stock = {
        "redis": {"memory_gib": 1, "client": "lmcache"},
        "engine": {"kv_cache_gib": 0.6, "env": {"PDKIT_DISABLE_FIXES": ",".join(off)}},
    }
    ours = {"redis": {"memory_gib": 1}, "engine": {"kv_cache_gib": 0.6}}
    with (
        folder_with_model() as (folder, model),
        _stack(folder, model, "ours", ours) as first,
        _stack(folder, model, "stock", stock) as second,
    ):
        yield first, second


@contextlib.contextmanager
def _stack(folder: Path, model: Path, name: str, more: dict[str, Any]) -> Iterator[Side]:
    spec = {"name": name, "lmcache": {"staging_gib": 0.5}, **more}
    with stack_in(folder, model, **spec) as (files, port):
        producer, consumer = engines(files, port)
        state = json.loads(files.state_file.read_text(encoding="utf-8"))
        pid = int(state["services"]["consumer-0"]["pid"])
        log = files.logs_dir / "consumer-0.log"
        yield Side(name, producer, consumer, store_of(files), log, pid)
