"""The stacks of the trials, started and found."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from bench import real_shape
from bench.check_power.server import ServerBench
from bench.check_power.stack import Bench
from bench.check_power.trials import Series
from bench.kit import free_ports, started
from deploy.runtime.home import Home
from deploy.stack.layout import REDIS_PASSWORD
from deploy.workflows.running import require_stack

NAME = "power"
COMMON = {"name": NAME, "vendor": "cpu", "runtime": "process", "topology": "1p1d"}
SPEC = {**COMMON, "redis": {"client": "lmcache"}}
# Little memory, which is searched for each chunk.
SERVER_SPEC = {**COMMON, "connector": "lmcache-mp", "lmcache": {"server_gib": 0.0625}}


@contextlib.contextmanager
def running_bench(series: Series) -> Iterator[Bench]:
    """Start a stack, and end it with the context."""
    layers = series.layers
    with tempfile.TemporaryDirectory(prefix="pdkit-power-") as name:
        folder = Path(name)
        model = {"model": str(real_shape.make(folder / "half-b", layers=layers))} if layers else {}
        spec = {**(SERVER_SPEC if series.tier else SPEC), "engine": {"dtype": series.dtype}}
        with started(folder, {**spec, **model, "port": free_ports()}):
            yield bench_on(Home.from_environ({"PDKIT_HOME": name}), NAME, series.tier)


def bench_on(home: Home, name: str, tier: str = "") -> Bench:
    """Return the bench on a stack that runs."""
    running = require_stack(home, name)
    socket, secret = running.stack.redis[0].socket, running.secrets[REDIS_PASSWORD]
    store = redis.Redis(unix_socket_path=socket, password=secret.reveal())
    return ServerBench(home, name, store, tier) if tier else Bench(home, name, store)
