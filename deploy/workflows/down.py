"""`deploy down`: end every process of a stack and remove what it left."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.runtime.launcher import ProcessLauncher
from deploy.runtime.state import read_state
from deploy.workflows.prepare import Report

_STOP_S = 15.0


@dataclass(frozen=True)
class DownResult:
    name: str
    was_up: bool
    stopped: tuple[str, ...]
    others: tuple[str, ...]


def stop_stack(home: Home, name: str, report: Report) -> DownResult:
    """Stop a stack, whatever state it is in. The caller holds its lock.

    Processes are found by their records, and by the mark that each of them carries: that also
    finds those of a stack whose state file is broken.
    """
    files = home.stack(name)
    launcher = ProcessLauncher(files)
    try:
        state = read_state(files.state_file, name)
    except StateError as exc:
        report(f"{exc.message}; looking for its processes by their mark")
        state = None
    records = state.services if state else {}
    grace_s = float(state.spec.get("timeouts", {}).get("stop_s", _STOP_S)) if state else _STOP_S
    alive = tuple(name for name, record in records.items() if launcher.state(record) == "running")
    if alive:
        report(f"stopping {', '.join(alive)}")
    launcher.stop(records, grace_s=grace_s)
    others = launcher.stop_marked(grace_s=grace_s)
    was_up = bool(alive or others or files.state_file.exists())
    launcher.clear(keep_logs=False)
    return DownResult(name, was_up, alive, home.stacks_beside(name))
