"""What the connector's fixes cost on the hot path: the same calls untouched and fixed, in pairs.

Two processes hold the installed LMCache, one with the fixes that a CPU needs to move KV at all
(B15, B17), one with all of them. They take turns in every round, so that a noisy machine hurts both
alike. Prints a table; the last column is the difference as a part of an engine's step.

    .venv/bin/python bench/fix_overhead.py [--rounds 30] [--step-ms 10] [--json]

A decode step of 10 ms is a fast one; give your own by --step-ms. Needs redis-server on PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HEADS, HEAD_SIZE, BLOCK, CHUNK = 16, 8, 128, 32, 256
PROMPT_CHUNKS = 3
RUNNING = 32
STEPS_A_ROUND = 50
NEEDED_ON_CPU = ("B15", "B17")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=10.0, help="an engine's decode step")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=("untouched", "fixed"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options.port)
        return
    with redis_server() as port:
        measured = compare(options.rounds, port)
    report(measured, options)


# The measured side


def serve(side: str, port: int) -> None:
    """Run every operation once a line of standard input; print the seconds of each as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT / "deploy" / "connector"))
    from pdkit_connector.registry import Registry, discover
    from pdkit_connector.setting import Setting

    registry = Registry(discover())
    off = [fix.id for fix in registry.fixes if side == "untouched" and fix.id not in NEEDED_ON_CPU]
    registry.apply(Setting(device_type="cpu", block_size=BLOCK), off)
    registry.require_no_failure()
    operations = {**storage_operations(port), **step_operations()}
    for _ in sys.stdin:
        took = {name: run() for name, run in operations.items()}
        print(json.dumps(took), file=answers, flush=True)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def storage_operations(port: int) -> dict[str, Callable[[], float]]:
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

    def store() -> float:
        first = next(count) * 10**6
        state["tokens"] = tokens = list(range(first, first + PROMPT_CHUNKS * CHUNK))
        took = timed(lambda: engine.store(tokens, kvcaches=kv, slot_mapping=slots, req_id="a"))
        while engine.lookup(tokens) < len(tokens):
            time.sleep(0.01)
        return took

    def lookup() -> float:
        return timed(lambda: engine.lookup(state["tokens"]))

    def load() -> float:
        tokens = state["tokens"]
        return timed(lambda: engine.retrieve(tokens, kvcaches=kv, slot_mapping=slots, req_id="b"))

    return {"store a prompt": store, "look a prompt up": lookup, "load a prompt": load}


def step_operations() -> dict[str, Callable[[], float]]:
    """Build and serve the metadata of decode steps, which move nothing, in the vLLM adapter."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker
    from pdkit_connector.adapter_miniature import IdleEngine, miniature, new_request

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

    def steps() -> float:
        total = 0.0
        for _ in range(STEPS_A_ROUND):
            for name in names:
                scheduler._request_trackers[name] = RequestTracker(
                    name, prompt, list(range(prompt)), list(blocks)
                )
            total += timed(one_step)
        return total / STEPS_A_ROUND

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


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            ("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "",  # noqa: S607
             "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
            cwd=folder, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield port
        finally:
            server.terminate()
            server.wait()


def compare(rounds: int, port: int) -> dict[str, dict[str, list[float]]]:
    """Return operation → side → seconds, one a round."""
    sides = {side: start(side, port) for side in ("untouched", "fixed")}
    measured: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for side in order:
            for name, took in ask(sides[side]).items():
                if number:  # the first round warms up
                    measured.setdefault(name, {}).setdefault(side, []).append(took)
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for process in sides.values():
        process.terminate()
        process.wait()
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
        (sys.executable, __file__, "--side", side, "--port", str(port)),
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin and process.stdout  # noqa: S101
    process.stdin.write("go\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        sys.exit("a side died: run this file with --side fixed --port PORT to see why")
    return dict(json.loads(line))


def report(measured: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    rows = []
    for name, sides in measured.items():
        pairs = list(zip(sides["untouched"], sides["fixed"], strict=True))
        untouched, fixed = (statistics.median(values) for values in zip(*pairs, strict=True))
        extra = statistics.median(after - before for before, after in pairs)
        # A step that stores or loads is at least as long as the store or the load.
        step = max(untouched, options.step_ms / 1000)
        rows.append({
            "operation": name, "untouched_ms": untouched * 1000, "fixed_ms": fixed * 1000,
            "ratio": fixed / untouched, "extra_ms": extra * 1000, "part_of_step": extra / step,
        })  # fmt: skip
    if options.json:
        print(json.dumps({"rounds": options.rounds, "step_ms": options.step_ms, "rows": rows}))
        return
    head = ("untouched", "fixed", "ratio", "extra", "of a step")
    print(f"{'operation':<20} {head[0]:>12} {head[1]:>12} {head[2]:>7} {head[3]:>11} {head[4]:>10}")
    for row in rows:
        print(
            f"{row['operation']:<20} {row['untouched_ms']:>9.3f} ms {row['fixed_ms']:>9.3f} ms "
            f"{row['ratio']:>7.3f} {row['extra_ms']:>8.3f} ms {100 * row['part_of_step']:>8.2f} %"
        )


if __name__ == "__main__":
    main()
