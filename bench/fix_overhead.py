"""What the connector's fixes cost on the hot path: the same calls untouched and fixed, in pairs.

Two processes hold the installed LMCache, one with the fixes that a CPU needs to move KV at all
(B15, B17), one with all of them. They take turns at every operation, so that a noisy machine hurts
both alike, and are restarted four times, since what a process has allocated before decides how
long its copies take. Prints a table: `CPU` is the time of all threads of a process, `extra` the
median of the differences by the clock, with the limits between which it lies with 95 % certainty,
and `of a step` the same as a part of the shortest step in which the operation happens:

- a step that stores computes the KV it stores, and one that loads computes what was not stored, at
  least one token: either lasts as long as a decode step and, on top, as the store or load itself,
  for which the engine waits;
- a lookup, and the bookkeeping of running requests, happen in any step: a decode step is the least.

    .venv/bin/python -m bench.fix_overhead [--rounds 40] [--step-ms 10] [--json]

A decode step of 10 ms is a fast one; give your own by --step-ms. Needs redis-server on PATH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.kit import ROOT, median_within
from bench.redis_path.server import redis_server

LAYERS, HEADS, HEAD_SIZE, BLOCK, CHUNK = 16, 8, 128, 32, 256
PROMPT_CHUNKS = 3
RUNNING = 32
STEPS_A_ROUND = 50
NEEDED_ON_CPU = ("B15", "B17")
# For these the engine waits, on top of what the step computes.
WAITED_FOR = ("store a prompt", "load a prompt")
SIDES = ("untouched", "fixed")
RESTARTS = 4


class Took(NamedTuple):
    """What one operation took, in seconds: by the clock, and of the process' threads together."""

    seconds: float
    cpu_seconds: float


Measured = dict[str, dict[str, list[Took]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=10.0, help="an engine's decode step")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options.port)
        return
    with redis_server(1024) as server:
        measured = compare(options.rounds, server.port)
    report(measured, options)


# The measured side


def serve(side: str, port: int) -> None:
    """Run the operation that a line of standard input names; print its seconds as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT / "deploy" / "connector"))
    from pdkit_connector.registry import Registry, Setting, discover

    registry = Registry(discover())
    off = [fix.id for fix in registry.fixes if side == "untouched" and fix.id not in NEEDED_ON_CPU]
    registry.apply(Setting(device_type="cpu", block_size=BLOCK), off)
    registry.require_no_failure()
    operations = {**storage_operations(port), **step_operations()}
    print(json.dumps(list(operations)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(operations[line.strip()]()), file=answers, flush=True)


def timed(work: Callable[[], Any]) -> Took:
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - began, time.process_time() - cpu_began)


def storage_operations(port: int) -> dict[str, Callable[[], Took]]:
    """Store, look up and load a prompt by LMCache's engine, its CPU mover and a real Redis."""
    import torch
    from lmcache.utils import EngineType
    from lmcache.v1 import gpu_connector
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=1.0,
        remote_url=f"redis://127.0.0.1:{port}", remote_serde="naive",
    )  # fmt: skip
    shape = (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE)
    facts = LMCacheMetadata(
        model_name=f"bench-{os.getpid()}", world_size=1, local_world_size=1, worker_id=0,
        local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=shape,
    )  # fmt: skip
    mover = gpu_connector.CreateGPUConnector(config, facts, EngineType.VLLM)
    engine = LMCacheEngineBuilder.get_or_create(
        "bench", config, facts, mover, lambda tensor, _src: tensor, lambda thing, _src: thing
    )
    engine.post_init()
    blocks = PROMPT_CHUNKS * CHUNK // BLOCK
    kv = [
        torch.rand(blocks + 1, HEADS, BLOCK, 2 * HEAD_SIZE).to(torch.bfloat16)
        for _ in range(LAYERS)
    ]
    slots = torch.arange(BLOCK, (blocks + 1) * BLOCK)
    count = iter(range(10**9))
    state: dict[str, list[int]] = {}

    def store() -> Took:
        first = next(count) * 10**6
        state["tokens"] = tokens = list(range(first, first + PROMPT_CHUNKS * CHUNK))
        took = timed(lambda: engine.store(tokens, kvcaches=kv, slot_mapping=slots, req_id="a"))
        while engine.lookup(tokens) < len(tokens):
            time.sleep(0.01)
        return took

    def lookup() -> Took:
        return timed(lambda: engine.lookup(state["tokens"]))

    def load() -> Took:
        tokens = state["tokens"]
        return timed(lambda: engine.retrieve(tokens, kvcaches=kv, slot_mapping=slots, req_id="b"))

    return {"store a prompt": store, "look a prompt up": lookup, "load a prompt": load}


def step_operations() -> dict[str, Callable[[], Took]]:
    """Build and serve the metadata of decode steps, which move nothing, in the vLLM adapter."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker
    from pdkit_connector.in_engine.adapter_miniature import IdleEngine, miniature, new_request

    scheduler, worker = miniature(client=object()), miniature(engine=IdleEngine())
    prompt = 1024
    names = [f"request-{number}" for number in range(RUNNING)]
    for name in names:
        tokens = list(range(prompt + 1))
        scheduler._unfinished_requests[name] = new_request(
            prompt + 1, request_id=name, all_token_ids=tokens, num_computed_tokens=prompt
        )
    cached = SimpleNamespace(req_ids=names, resumed_req_ids=set(), new_block_ids=[None] * RUNNING)
    output = SimpleNamespace(
        finished_req_ids=(), scheduled_new_reqs=(), scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 1),
    )  # fmt: skip
    blocks = list(range(1, 2 + prompt // 4))

    def steps() -> Took:
        took = []
        for _ in range(STEPS_A_ROUND):
            for name in names:
                scheduler._request_trackers[name] = RequestTracker(
                    name, prompt, list(range(prompt)), list(blocks)
                )
            took.append(timed(one_step))
        return Took(*(statistics.mean(column) for column in zip(*took, strict=True)))

    def one_step() -> None:
        metadata = scheduler.build_connector_meta(output)
        worker._parent = SimpleNamespace(
            _connector_metadata=metadata, _get_connector_metadata=lambda: metadata
        )
        worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
        worker.wait_for_save()
        worker.get_finished(set())

    return {f"decode step of {RUNNING}": steps}


# The two sides, in turns


def compare(rounds: int, port: int) -> Measured:
    """Return operation → side → what each round took."""
    measured: Measured = {}
    for number in range(RESTARTS):
        rounds_now = rounds // RESTARTS + (number < rounds % RESTARTS)
        sides = {side: start(side, port) for side in SIDES}
        operations, _ = [answer(process) for process in sides.values()]
        for at in range(rounds_now + 1):
            order = SIDES if at % 2 else SIDES[::-1]
            for name, side in itertools.product(operations, order):
                took = ask(sides[side], name)
                if at:  # the first round warms up
                    rows = measured.setdefault(name, {one: [] for one in SIDES})
                    rows[side].append(took)
            print(f"\rpair {number + 1}, round {at}", end="", file=sys.stderr, flush=True)
        for process in sides.values():
            process.terminate()
            process.wait()
    print(file=sys.stderr)
    return measured


def start(side: str, port: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    return subprocess.Popen(
        (sys.executable, "-m", "bench.fix_overhead", "--side", side, "--port", str(port)),
        cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def ask(process: subprocess.Popen[str], operation: str) -> Took:
    assert process.stdin  # noqa: S101 - for mypy
    process.stdin.write(f"{operation}\n")
    process.stdin.flush()
    return Took(*answer(process))


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout  # noqa: S101 - for mypy
    line = process.stdout.readline()
    if not line:
        sys.exit("a side died: run it with --side fixed --port PORT to see why")
    return json.loads(line)


def report(measured: Measured, options: argparse.Namespace) -> None:
    rows = [row(name, sides, options.step_ms) for name, sides in measured.items()]
    if options.json:
        print(json.dumps({"rounds": options.rounds, "step_ms": options.step_ms, "rows": rows}))
        return
    print(
        f"{'operation':<18} {'untouched':>12} {'fixed':>12} {'ratio':>6} {'CPU':>17} "
        f"{'extra ms':>26} {'step':>11} {'of a step':>25}"
    )
    for one in rows:
        print(
            f"{one['operation']:<18} {one['untouched_ms']:>9.3f} ms {one['fixed_ms']:>9.3f} ms "
            f"{one['ratio']:>6.3f} {one['cpu_ms'][0]:>7.2f} > {one['cpu_ms'][1]:>7.2f} "
            f"{limits(one['extra_ms'], 3):>26} "
            f"{one['shortest_step_ms']:>8.1f} ms {limits(one['percent_of_step'], 2):>23} %"
        )


def row(name: str, sides: dict[str, list[Took]], step_ms: float) -> dict[str, Any]:
    """Compare one operation's sides; times in milliseconds."""
    untouched, fixed = (1000 * statistics.median(t.seconds for t in sides[s]) for s in SIDES)
    pairs = zip(*(sides[side] for side in SIDES), strict=True)
    extra = median_within([1000 * (after.seconds - before.seconds) for before, after in pairs])
    step = step_ms + (untouched if name in WAITED_FOR else 0.0)
    return {
        "operation": name, "untouched_ms": untouched, "fixed_ms": fixed,
        "cpu_ms": [1000 * statistics.median(t.cpu_seconds for t in sides[s]) for s in SIDES],
        "ratio": fixed / untouched, "extra_ms": extra, "shortest_step_ms": step,
        "percent_of_step": [100 * value / step for value in extra],
    }  # fmt: skip


def limits(values: list[float], digits: int) -> str:
    middle, low, high = (f"{value:+.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
