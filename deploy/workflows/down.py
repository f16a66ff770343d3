"""`deploy down`: end every service of a stack and remove what it left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.runtime.launcher import Launcher
from deploy.runtime.state import StackState, read_state
from deploy.workflows.prepare import Report
from deploy.workflows.running import launcher_for

_STOP_S = 15.0


@dataclass(frozen=True)
class DownResult:
    name: str
    was_up: bool
    stopped: tuple[str, ...]
    others: tuple[str, ...]


def stop_stack(home: Home, name: str, report: Report) -> DownResult:
    """Stop a stack, whatever state it is in. The caller holds its lock.

    Services are found by their records, and by the mark that each of them carries: that also finds
    those of a stack whose state file is broken.

    Raises:
        DockerUnavailable: its services are containers, and no Docker engine answers.
    """
    files = home.stack(name)
    try:
        state = read_state(files.state_file, name)
    except StateError as exc:
        report(f"{exc.message}; looking for its services by their mark")
        state = None
    records = state.services if state else {}
    grace_s = float(state.spec.get("timeouts", {}).get("stop_s", _STOP_S)) if state else _STOP_S
    alive: tuple[str, ...] = ()
    others = 0
    was_there = files.state_file.exists()
    for launcher in _launchers(state, home, name):
        running = tuple(n for n, record in records.items() if launcher.state(record) == "running")
        if running:
            report(f"stopping {', '.join(running)}")
        alive += running
        launcher.stop(records, grace_s=grace_s)
        others += launcher.stop_marked(grace_s=grace_s)
        launcher.clear(keep_logs=False)
    return DownResult(name, bool(alive or others or was_there), alive, home.stacks_beside(name))


def _launchers(state: StackState | None, home: Home, name: str) -> Iterator[Launcher]:
    """Yield the runtime of the stack; where nothing says which, every one that is there."""
    files = home.stack(name)
    if state is not None and "runtime" in state.machine:
        yield launcher_for(str(state.machine["runtime"]), name, files)
        return
    from deploy.runtime.compose.docker import engine_answers

    yield launcher_for("process", name, files)
    if engine_answers():
        yield launcher_for("compose", name, files)
