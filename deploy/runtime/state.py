"""What is remembered of a running stack: its spec, and each service's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy import __version__
from deploy.errors import StateError
from deploy.runtime.home import write_private

FORMAT = 2


@dataclass(frozen=True)
class ServiceRecord:
    """A started service.

    Attributes:
        pid: of a process, also the id of its session; 0 for a container, which goes by its name.
        start_time: seconds since the boot, which differs if another process got the same pid.
        starts: how often it was started since `up`; more than one means it was repaired.
        version: of the kit that started it; "" if that was too old to write it down.
    """

    name: str
    pid: int = 0
    start_time: float = 0.0
    log: str = ""
    starts: int = 1
    version: str = __version__


@dataclass(frozen=True)
class StackState:
    """The whole state file.

    Attributes:
        spec: the spec as plain values, so that the plan can be made again.
        machine: what was detected when the stack was planned, for the same reason.
        model: what `--model` meant then: reference, name, source, shape.
        fingerprint: of the stack as it was started.
        boot: the boot id for which pids and start times are valid; "" for containers, which survive
            a reboot.
        generation: what was started, when, and how that went.
        history: the plans before this one, the newest first.
        up_extra_s: what the `up` that started all engines took beyond the slowest one's own start,
            its check included; None if no `up` did.
    """

    name: str
    fingerprint: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    model: dict[str, Any]
    boot: str
    services: dict[str, ServiceRecord] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    history: tuple[dict[str, Any], ...] = ()
    up_extra_s: float | None = None

    def with_service(self, record: ServiceRecord) -> StackState:
        """Return the state with this service's record, in place of an older one."""
        return replace(self, services={**self.services, record.name: record})


def boot_id() -> str:
    """Return the kernel's boot id; pids and start times are valid within one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_state(path: Path, name: str) -> StackState | None:
    """Return the state, or None if the stack has none.

    Raises:
        StateError: the file is there and cannot be understood.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] > FORMAT:
            raise StateError(
                f"the state of stack '{name}' was written by a newer pdkit ({path})",
                hint="use that version of pdkit",
            )
        services = {
            key: ServiceRecord(
                name=key,
                pid=int(value["pid"]),
                start_time=float(value["start_time"]),
                log=str(value["log"]),
                starts=int(value.get("starts", 1)),
                version=str(value.get("version", "")),
            )
            for key, value in raw["services"].items()
        }
        return StackState(
            name=raw["name"],
            fingerprint=raw["fingerprint"],
            spec=dict(raw["spec"]),
            machine=dict(raw["machine"]),
            model=dict(raw["model"]),
            boot=raw["boot"],
            services=services if raw["boot"] in ("", boot_id()) else {},
            generation=dict(raw["generation"]),
            history=tuple(dict(past) for past in raw.get("history", ())),
            up_extra_s=None if raw.get("up_extra_s") is None else float(raw["up_extra_s"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StateError(
            f"the state file of stack '{name}' is broken: {path} ({type(exc).__name__}: {exc})",
            hint=f"deploy down --name {name}, which removes it and finds the processes without it",
        ) from exc


def write_state(path: Path, state: StackState) -> None:
    """Replace the state file in one step, so that a crash leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({"format": FORMAT, **asdict(state)}, indent=1, sort_keys=True)
    write_private(path.with_suffix(".tmp"), text)
    path.with_suffix(".tmp").replace(path)
