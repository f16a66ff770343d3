"""`deploy down`: end every service of a stack and remove what it left."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import MachineError, StateError
from deploy.runtime.boot import remove_unit
from deploy.runtime.home import Home
from deploy.runtime.launcher import Launcher
from deploy.runtime.state import StateFile, boot_id, read_state_file
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

    Services are found by the mark that each of them carries, whatever the stack's files say; those
    only tell what to report and how long to wait. With `volumes`, what its engines stored in a
    Redis of the user's own goes, too: the stack's, or where it was not up the one that `url_file`
    names.

    Raises:
        DockerUnavailable: its services are containers, and no Docker engine answers.
        ConfigError: `url_file` cannot be read.
        MachineError: its services have ended, and its files cannot be removed.
    """
    files = home.stack(name)
    was_there = os.path.lexists(files.state_file)
    try:
        state = read_state_file(files.state_file, name)
    except StateError as exc:
        report(f"{exc.message}; looking for its services by their marks")
        state = None
    try:
        url = remaining_keys_url(files.secrets_dir, url_file if volumes else None)
    except StateError as exc:
        report(f"{exc.message}; keys that it left in your own Redis are not looked for")
        url = ""
    records = state.services if state else {}
    # A pid of before a reboot is another process's.
    ours = records if state and state.boot == boot_id() else {}
    grace_s = _STOP_S if state is None or state.stop_s is None else state.stop_s
    alive: tuple[str, ...] = ()
    marked = 0
    launchers = list(_launchers(state, home, name))
    end_supervisor(files.supervisor_socket)
    for launcher in launchers:
        running = tuple(n for n, record in records.items() if launcher.state(record) == "running")
        if running:
            report(f"stopping {', '.join(running)}")
        found = launcher.stop_marked(grace_s=grace_s, records=ours)
        if found and not running:
            report(f"stopped {found} of its processes or containers, found by their marks")
        marked += found
        # Those of a copied state file are another stack's, and run on.
        alive += tuple(n for n in running if launcher.state(records[n]) != "running")
    for launcher in launchers:
        launcher.clear(keep_logs=False)
    remove_unit(home, name)
    if os.path.lexists(files.root):
        raise MachineError(
            f"the services of stack '{name}' have ended, but {files.root} cannot be removed",
            hint=f"rm -rf {shlex.quote(str(files.root))}",
        )
    client = state.redis_client if state else ""
    left = remaining_keys(url, name, client=client, remove=volumes) if url else None
    if left is None or left.removed:  # the KV of its checks' canaries is gone
        with suppress(OSError):  # then the next check finds that it is gone
            home.canaries_file(name).unlink()
    return DownResult(
        name, bool(alive or marked or was_there), alive, home.stacks_beside(name), left
    )


def _launchers(state: StateFile | None, home: Home, name: str) -> Iterator[Launcher]:
    """Yield the launcher of processes, and that of containers where the stack may have some.

    Looking for processes costs little, so the state file is not trusted to say that there are none.

    Raises:
        DockerUnavailable: the stack has containers, and no Docker engine answers.
    """
    from deploy.runtime.compose.docker import answering_engine, engine_answers
    from deploy.runtime.compose.project import COMPOSE_FILE

    files = home.stack(name)
    yield launcher_for("process", name, files)
    if (state and state.runtime == "compose") or os.path.lexists(files.root / COMPOSE_FILE):
        answering_engine()
        yield launcher_for("compose", name, files)
    elif (state is None or state.runtime != "process") and engine_answers():
        yield launcher_for("compose", name, files)
