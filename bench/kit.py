"""The kit's own commands, as benchmarks run them, and stacks that end with a context."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import redis
import yaml

from deploy.runtime.home import Home, StackHome

ROOT = Path(__file__).resolve().parents[1]
_COMMAND_S = 900.0


def say(what: str) -> None:
    """Tell people how far a benchmark is."""
    print(what, file=sys.stderr, flush=True)


def deploy_command(folder: Path, *arguments: str) -> None:
    """Run a command of the kit, whose home is a folder; nothing is restarted behind its back."""
    _run(folder, arguments, _COMMAND_S, stdout=2, check=True)


def deploy_json(folder: Path, *arguments: str, timeout_s: float = _COMMAND_S) -> dict[str, Any]:
    """Return what a command prints with `--json`, whether it succeeds or not."""
    ran = _run(folder, (*arguments, "--json"), timeout_s, stdout=subprocess.PIPE, check=False)
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def _run(
    folder: Path, arguments: tuple[str, ...], timeout_s: float, *, stdout: int, check: bool
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        (sys.executable, "-m", "deploy", *arguments),
        env={**os.environ, "PDKIT_HOME": str(folder), "PDKIT_SUPERVISE": "false"},
        cwd=ROOT, check=check, timeout=timeout_s, stdout=stdout,
    )  # fmt: skip


@contextlib.contextmanager
def started(folder: Path, spec: Mapping[str, Any]) -> Iterator[StackHome]:
    """Start a stack, unchecked, and end it with the context; yields its files."""
    name = spec["name"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(dict(spec)), encoding="utf-8")
    say(f"starting {name}")
    try:
        deploy_command(folder, "up", "-f", str(file), "--no-check")
        yield Home(folder, folder).stack(name)
    finally:
        deploy_command(folder, "down", "--name", name)


def store_of(files: StackHome) -> redis.Redis:
    """Return a client of a stack's only Redis."""
    password = (files.secrets_dir / "redis_password").read_text(encoding="utf-8").strip()
    return redis.Redis(unix_socket_path=str(files.temp_dir / "redis.sock"), password=password)


def free_ports() -> int:
    """Return the first of 20 free ports."""
    for base in range(29000, 32000, 100):
        taken = {c.laddr.port for c in psutil.net_connections("tcp") if c.laddr}
        if not taken & set(range(base, base + 20)):
            return base
    raise RuntimeError("no free ports")


def cpu_s(pid: int) -> float:
    """Return the seconds that all threads of a process have run so far, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # the kernel's name of that process's clock


def family_cpu_s(pid: int) -> float:
    """Return the same of a process and all that it has started."""
    parent = psutil.Process(pid)
    return sum(cpu_s(one.pid) for one in (parent, *parent.children(recursive=True)))


def median_within(values: list[float]) -> list[float]:
    """Return the median and the limits in which it lies with 95 % certainty, by ranks alone."""
    ranked, count = sorted(values), len(values)
    # As many values lie below the true median as coins fall heads: normal for 20 rounds and more.
    off = 0.98 * count**0.5
    low, high = max(0, int(count / 2 - off)), min(count - 1, int(count / 2 + off))
    return [statistics.median(ranked), ranked[low], ranked[high]]
