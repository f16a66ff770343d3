"""What vLLM's and LMCache's own code makes of goldens with LMCache's server, as JSON on stdout.

Run as `python -m tests.gpu.mp_facts VENDOR`, the pair first on PYTHONPATH. Connectors are
made as vLLM makes them, and talk to a real server. That has no GPU and runs on the CPU, with the
LMCache that is installed, of the same release. No KV moves: engines' memory is not registered.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import REPO
from tests.gpu import emulated, goldens
from tests.gpu.facts import config_of, engine_facts, served
from tests.gpu.forked import in_fork

PROMPT = 600
_STARTS_WITHIN_S = 300.0


def main(vendor: str) -> None:
    told = os.dup(1)
    os.dup2(2, 1)  # what vLLM and LMCache print
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as requests:
        emulated.install(vendor)
        facts = _facts(vendor, Path(folder), requests)
    with os.fdopen(told, "w") as stdout:
        json.dump(facts, stdout)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run LMCache's server on the CPU; yield its socket for engines once it is there."""
    requests, pages = str(folder / "requests"), folder / "pages"
    argv = (
        sys.executable, "-m", "pdkit_connector.lmcache_server", requests, str(pages),
        "--l1-size-gb", "0.01", "--eviction-policy", "LRU", "--chunk-size", "256",
        "--supported-transfer-mode", "lmcache_driven",
    )  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(REPO / "deploy" / "connector")}
    with subprocess.Popen(argv, env=environ) as running:
        try:
            until = time.monotonic() + _STARTS_WITHIN_S
            while not pages.exists():
                assert running.poll() is None and time.monotonic() < until, "it did not start"
                time.sleep(0.1)
            yield requests
        finally:
            running.kill()


def _facts(vendor: str, folder: Path, requests: str) -> dict[str, Any]:
    from tests.gpu.engines import make_model

    model = str(make_model(folder / "model"))
    engines = [served(engine, model) for engine in goldens.mp_engines(vendor)]
    named = {f"{one.golden} {one.name}": one for one in engines}
    return {
        "releases": {name: importlib.metadata.version(name) for name in ("vllm", "lmcache")},
        "engines": {name: engine_facts(one) for name, one in named.items()},
        "servers": {name: _server(argv) for name, argv in goldens.server_argv(vendor).items()},
        "connectors": {
            name: in_fork(lambda one=one: _connectors(one, requests)) for name, one in named.items()
        },
    }


def _server(argv: Sequence[str]) -> dict[str, Any]:
    """Return what LMCache's own parsers make of the server's arguments."""
    import argparse

    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.distributed.config import parse_args_to_config
    from lmcache.v1.multiprocess.config import parse_args_to_mp_server_config
    from pdkit_connector.lmcache_server import server_argv

    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    arguments = parser.parse_args(server_argv(argv)[1:])
    own, storage = parse_args_to_mp_server_config(arguments), parse_args_to_config(arguments)
    memory = storage.l1_manager_config.memory_config
    return {
        "scripts": own.run_script_api_enabled,
        "transfer": own.supported_transfer_mode,
        "isolated": own.isolated_ipc,
        "chunk": own.chunk_size,
        "host": own.host,
        "mib": memory.size_in_bytes >> 20,
        "lazy": memory.use_lazy,
        "adapters": [type(one).__name__ for one in storage.l2_adapter_config.adapters],
    }


def _connectors(engine: goldens.Engine, requests: str) -> dict[str, Any]:
    """Make both sides of an engine's connector by vLLM's factory; ask the server for a prompt."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tests.gpu.steps import Consumer

    os.environ["PDKIT_KV_SERVER_SOCKET"] = requests
    config = config_of(engine)
    config.kv_transfer_config.kv_connector_extra_config["lmcache.mp.server_urls"] = [
        f"ipc://{requests}"
    ]
    consumer = Consumer(config)
    scheduler, worker = (
        KVConnectorFactory.create_connector(config, role, consumer.kv)
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    )
    return {
        "class": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
        "guarded": [
            type(scheduler.scheduler_adapter).__name__, type(worker.worker_adapter).__name__,
        ],
        "shares": _sharing(),
        "found": _found(scheduler, consumer.prompt(PROMPT)),
    }  # fmt: skip


def _sharing() -> list[str]:
    """Return what LMCache shares GPU memory and events by."""
    from lmcache.v1.platform import get_device_spec

    spec = get_device_spec("cuda")  # torch calls AMD's GPUs so, too
    return [spec.ipc_wrapper_cls.__name__, type(spec.event_ipc_backend).__name__]


def _found(scheduler: Any, prompt: Any) -> int | None:
    """Return how many tokens of a prompt the server has; None where it never said so."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found, _ = scheduler.get_num_new_matched_tokens(prompt, 0)
        if found is not None:
            return int(found)
        time.sleep(0.05)
    return None


if __name__ == "__main__":
    main(sys.argv[1])
