"""`deploy down`: end every service of a stack and remove what it left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import StateError
from deploy.runtime.boot import remove_unit
from deploy.runtime.home import Home
from deploy.runtime.launcher import Launcher
from deploy.runtime.state import StateFile, read_state_file
from deploy.runtime.supervisor import end_supervisor
from deploy.workflows.prepare import Report
from deploy.workflows.remaining_keys import RemainingKeys, remaining_keys, remaining_keys_url
from deploy.workflows.running import launcher_for

_STOP_S = 15.0


@dataclass(frozen=True)
class DownResult:
    """What `down` found and did.

    Attributes:
        left: the stack's keys in the user's own Redis; None if it had no such Redis.
    """

    name: str
    was_up: bool
    stopped: tuple[str, ...]
    others: tuple[str, ...]
    left: RemainingKeys | None = None


def stop_stack(
    home: Home, name: str, report: Report, *, volumes: bool = False, url_file: Path | None = None
) -> DownResult:
    """Stop a stack in any state. The caller holds its lock.

    Services are found by their records, and by the mark that each of them carries: that also finds
    those of a stack whose state file is broken. With `volumes`, what its engines stored in a Redis
    of the user's own goes, too: the stack's, or where it was not up the one that `url_file` names.

    Raises:
        DockerUnavailable: its services are containers, and no Docker engine answers.
        ConfigError: `url_file` cannot be read.
    """
    files = home.stack(name)
    try:
        state = read_state_file(files.state_file, name)
    except StateError as exc:
        report(f"{exc.message}; looking for its services by their labels")
        state = None
    records = state.services if state else {}
    grace_s = _STOP_S if state is None or state.stop_s is None else state.stop_s
    alive: tuple[str, ...] = ()
    others = 0
    url = remaining_keys_url(files.secrets_dir, url_file if volumes else None)
    was_there = files.state_file.exists()
    remove_unit(home, name)
    end_supervisor(files.supervisor_socket)
    for launcher in _launchers(state, home, name):
        running = tuple(n for n, record in records.items() if launcher.state(record) == "running")
        if running:
            report(f"stopping {', '.join(running)}")
        alive += running
        launcher.stop(records, grace_s=grace_s)
        others += launcher.stop_marked(grace_s=grace_s)
        launcher.clear(keep_logs=False)
    client = state.redis_client if state else ""
    left = remaining_keys(url, name, client=client, remove=volumes) if url else None
    return DownResult(
        name, bool(alive or others or was_there), alive, home.stacks_beside(name), left
    )


def _launchers(state: StateFile | None, home: Home, name: str) -> Iterator[Launcher]:
    """Yield the launcher of the stack's runtime; all that are available if it is unknown."""
    files = home.stack(name)
    if state is not None and state.runtime:
        yield launcher_for(state.runtime, name, files)
        return
    from deploy.runtime.compose.docker import engine_answers

    yield launcher_for("process", name, files)
    if engine_answers():
        yield launcher_for("compose", name, files)
