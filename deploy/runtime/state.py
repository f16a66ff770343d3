"""The state file of a stack: what it says of its services, and how it is replaced."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import __version__
from deploy.errors import StateError
from deploy.runtime.home import replace_private
from deploy.runtime.own_files import read_json

FORMAT = 2
# What reading another version's values, or damaged ones, can raise; pydantic's error is a
# ValueError.
UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class ServiceRecord:
    """A started service.

    Attributes:
        pid: of a process, also the id of its session; 0 for a container, which goes by its name.
        start_time: seconds since the boot, which differs if another process got the same pid.
        starts: how often it was started since `up`; more than one means it was repaired.
        version: of the kit that started it.
    """

    name: str
    pid: int = 0
    start_time: float = 0.0
    log: str = ""
    starts: int = 1
    version: str = __version__


@dataclass(frozen=True)
class StateFile:
    """A state file, as far as a stack has to be found and stopped.

    Attributes:
        runtime, stop_s, redis_client: as the stack was planned; "" and None if the file does not
            say it.
        services: empty if they were processes of another boot.
        values: the whole file.
    """

    name: str
    boot: str
    runtime: str
    stop_s: float | None
    redis_client: str
    services: Mapping[str, ServiceRecord]
    values: Mapping[str, Any]


def boot_id() -> str:
    """Return the kernel's boot id; pids and start times are valid within one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_state_file(path: Path, name: str) -> StateFile | None:
    """Read a stack's state file; None if it has none.

    Raises:
        StateError: the file is there and cannot be understood.
    """
    try:
        raw = read_json(path)
        if raw["format"] > FORMAT:
            raise StateError(
                f"the state of stack '{name}' was written by a newer pdkit ({path})",
                hint="use that version of pdkit",
            )
        if raw["name"] != name:
            raise ValueError(f"it belongs to the stack {raw['name']!r}")
        services = {key: _record(key, value) for key, value in raw["services"].items()}
        stop_s = raw["spec"].get("timeouts", {}).get("stop_s")
        return StateFile(
            name=name,
            boot=str(raw["boot"]),
            runtime=str(raw["machine"].get("runtime", "")),
            stop_s=None if stop_s is None else float(stop_s),
            redis_client=str(raw["spec"].get("redis", {}).get("client", "")),
            services=services if raw["boot"] in ("", boot_id()) else {},
            values=raw,
        )
    except FileNotFoundError:
        return None
    except (OSError, *UNFIT) as exc:
        raise StateError(
            f"the state file of stack '{name}' is broken: {path} ({type(exc).__name__}: {exc})",
            hint=f"deploy down --name {name}, which removes it and finds the processes without it",
        ) from exc


def _record(name: str, value: Mapping[str, Any]) -> ServiceRecord:
    pid, start_time = int(value["pid"]), float(value["start_time"])
    if pid < 0 or (pid and not 0 < start_time < math.inf):  # would fit other processes, too
        raise ValueError(f"{name} has pid {pid} and start time {start_time}")
    return ServiceRecord(
        name=name,
        pid=pid,
        start_time=start_time,
        log=str(value["log"]),
        starts=int(value["starts"]),
        version=str(value["version"]),
    )


def write_state_file(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the state file in one step, so that a crash leaves the old or the new one."""
    replace_private(path, json.dumps({"format": FORMAT, **values}, indent=1, sort_keys=True))
