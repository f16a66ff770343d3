"""What LMCache's server keeps of engines that were killed while it moved their KV.

    python -m bench.lmcache_server_kills [--kills 100] [--seed 1]

Starts a CPU stack with `--connector lmcache-mp`. Beside its engines, a process registers KV memory
as an engine does, by the connector's own adapters and without a model, and looks up, loads and
stores prompts without pause. It is killed at a random moment, and the next one of its name begins.
When the server's own limits have passed, it may keep nothing of them. Then `deploy check` must
pass.

Prints a table, and exits with 1 if something is left. Takes about 15 minutes, most of them the
server's limits.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp, ParallelStrategy
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper

from bench.kit import ROOT, deploy_json, free_ports, say, started
from bench.redis_path.report import markdown

sys.path.insert(0, str(ROOT / "deploy" / "connector"))
from pdkit_connector.server_connector import (
    SOCKET_ENV,
    GuardedAdapter,
    GuardedSchedulerAdapter,
    remove_left,
)

_NAME, _PREFIX = "kills", "pdkit-bench-killed"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
_SERVER_GIB = 0.0625
_LAYERS, _BLOCK, _TOKENS = 8, 16, 2048
_BLOCKS = _TOKENS // _BLOCK  # of a prompt
_PROMPTS = 48  # of 4 MiB each: three times the server's memory
_AT_ONCE = 4  # requests of an engine
_LONGEST_S = 0.3  # that an engine lives
# LMCache unlocks what was to be read after 300 s, and ends sessions a minute after 600 s.
_SETTLES_S = 690.0

Counts = dict[str, int]


def main() -> int:
    """Kill, wait, and report what is left."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    spec = {
        "name": _NAME, "vendor": "cpu", "runtime": "process", "connector": "lmcache-mp",
        "port": free_ports(), "lmcache": {"server_gib": _SERVER_GIB},
        "timeouts": {"hung_s": 10},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, started(Path(name), spec) as files:
        os.environ[SOCKET_ENV] = str(files.temp_dir / "kv.sock")
        server = Server(Path(name), str(files.temp_dir / "kv-pages.sock"))
        chance = random.Random(given.seed)  # noqa: S311 - no secret
        killed(chance.randrange(2**32), 2.0)  # what the server makes once
        before = server.counts()
        for number in range(given.kills):
            killed(chance.randrange(2**32), chance.uniform(0, _LONGEST_S))
            if number % 10 == 9:
                say(f"{number + 1} of {given.kills} killed")
        at_once = server.counts()
        remove_left(_PREFIX)
        say(f"waiting {_SETTLES_S:g} s for the server's limits")
        time.sleep(_SETTLES_S)
        settled = server.counts()
        check = deploy_json(Path(name), "check", "--name", _NAME)
    rows = [(what, *map(str, (before[what], at_once[what], settled[what]))) for what in settled]
    print(markdown(("what", "before", "after the last kill", "later"), rows))
    print(f"deploy check: exit code {check['exit_code']}")
    left = [what for what in settled if settled[what] > before[what] and what not in _VARY]
    return 1 if left or check["exit_code"] else 0


class Server:
    """The stack's LMCache server, as it reports about itself and as the kernel knows it."""

    def __init__(self, folder: Path, pages: str) -> None:
        services = deploy_json(folder, "status", "--name", _NAME)["data"]["services"]
        pid = next(one["pid"] for one in services if one["name"] == "kv-server")
        self._process, self._pages = psutil.Process(pid), pages

    def counts(self) -> Counts:
        """Return what it holds."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=self._pages), timeout=60) as client:
            told = client.get("http://localhost/status").raise_for_status().json()
        (memory,) = told["storage_manager"]["l1_managers"].values()
        maps = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines()
        return {
            "engines that it knows": len(told["registered_gpu_ids"]),
            "mappings of killed engines' memory": sum(_PREFIX in line for line in maps),
            "files in /dev/shm": len(list(_SHARED_MEMORY.glob(f"{_PREFIX}-*"))),
            "objects locked for reading": memory["read_locked_count"],
            "objects half written": memory["staging_object_count"],
            "lookups": told["active_prefetch_jobs"],
            "results of lookups": told["storage_manager"]["prefetch_controller"][
                "completed_results_count"
            ],
            "sessions": told["active_sessions"],
            "file descriptors": self._process.num_fds(),
            "threads": self._process.num_threads(),
            "resident MiB": self._process.memory_info().rss // 2**20,
        }


_VARY = ("resident MiB", "threads")  # its pools of threads grow to their sizes


def killed(seed: int, after_s: float) -> None:
    """Run an engine, and kill it some time after it began to ask."""
    forking = multiprocessing.get_context("fork")
    asking = forking.Event()
    process = forking.Process(target=engine, args=(seed, asking))
    process.start()
    if not asking.wait(60):
        raise SystemExit("an engine did not get to ask within 60 s")
    time.sleep(after_s)
    process.kill()
    process.join()


def engine(seed: int, asking: Event) -> None:
    """Look up, load and store prompts until killed."""
    remove_left(_PREFIX)
    CpuShmTensorWrapper.SHM_NAME_PREFIX = f"/{_PREFIX}-"
    chance = random.Random(seed)  # noqa: S311 - no secret
    address = f"ipc://{os.environ[SOCKET_ENV]}"
    told: Any = (zmq.Context(), _PREFIX, _BLOCK, ParallelStrategy(False, 1, 0, 1, 1, 1))
    more = {"extra_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}}
    worker = GuardedAdapter(address, *told, **more)
    scheduler = GuardedSchedulerAdapter([address], *told, **more)
    shape = (2, _AT_ONCE * _BLOCKS, _BLOCK, 2, 32)
    kv = {f"layer.{n}": torch.ones(shape, dtype=torch.bfloat16) for n in range(_LAYERS)}
    groups = [EngineGroupInfo(0, tuple(range(_LAYERS)), _BLOCK)]
    worker.register_kv_caches(kv, groups, {"kv_layout": "NHD"})
    asking.set()
    for turn in itertools.count():
        asked = [
            Asked(f"{seed}-{turn}-{n}", n, chance.randrange(_PROMPTS)) for n in range(_AT_ONCE)
        ]
        for one in asked:
            scheduler.maybe_submit_lookup_request(one.name, one.tokens)
        for one in asked:
            while (found := scheduler.check_lookup_result(one.name)) is None:
                time.sleep(0.001)
            event = worker.create_recorded_event()
            if found:
                worker.submit_retrieve_request(one.name, one.part(0, found), event)
            if found < _TOKENS:
                worker.submit_store_request(one.name, one.part(found, _TOKENS), event)
        ended = {one.name for one in asked}
        while worker.store_futures or worker.retrieve_futures:
            worker.get_finished(ended)
            time.sleep(0.001)
        for one in asked:
            scheduler.cleanup_lookup_result(one.name)
            scheduler.end_session(one.name)


class Asked:
    """A request of an engine, with a prompt of its own and blocks of its own."""

    def __init__(self, name: str, place: int, prompt: int) -> None:
        self.name = name
        self.tokens = list(range(prompt * _TOKENS, (prompt + 1) * _TOKENS))
        self._blocks = list(range(place * _BLOCKS, (place + 1) * _BLOCKS))

    def part(self, start: int, end: int) -> LoadStoreOp:
        """Return what moves the KV of some of the tokens."""
        blocks = self._blocks[start // _BLOCK : end // _BLOCK]
        return LoadStoreOp(self.tokens, [blocks], start, end)


if __name__ == "__main__":
    sys.exit(main())
