"""`deploy down`: end every service of a stack and remove what it left, in a user's Redis, too."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.errors import MachineError, StateError
from deploy.runtime.boot import remove_unit
from deploy.runtime.home import Home
from deploy.runtime.launcher import Launcher
from deploy.runtime.secrets import read_secret_file, read_secrets
from deploy.runtime.state import StateFile, boot_id, read_state_file
from deploy.runtime.supervisor import end_supervisor
from deploy.runtime.url_store import UrlStore
from deploy.stack.kv_identity import key_prefix
from deploy.stack.layout import REDIS_URL
from deploy.workflows.prepare import Report
from deploy.workflows.running import launcher_for

_STOP_S = 15.0
_COUNT_S = 3.0


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
        report(f"{exc.message}; its keys in your own Redis are not looked for")
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


@dataclass(frozen=True)
class RemainingKeys:
    """The keys of one stack, by what they begin with.

    Attributes:
        keys: how many stay, or were removed; None if unknown.
        all_seen: the count is complete.
        why_not: why they could not be counted or removed; "" if they were.
    """

    prefix: str
    removed: bool
    keys: int | None = None
    all_seen: bool = True
    why_not: str = ""


def remaining_keys_url(secrets_dir: Path, url_file: Path | None) -> str:
    """Return the URL of the Redis that a stack left keys in; "" if the user supplied none.

    `url_file` is used if the stack no longer exists.

    Raises:
        ConfigError: that file cannot be read.
    """
    held = read_secrets(secrets_dir, (REDIS_URL,)).get(REDIS_URL)
    if held is not None:
        return held.reveal()
    return read_secret_file("redis.url_file", url_file) if url_file else ""


def remaining_keys(url: str, stack: str, *, client: str, remove: bool) -> RemainingKeys:
    """Count the keys that a stack left, or remove them. `client` is what stored them."""
    prefix = key_prefix(stack)
    if client == "lmcache":
        why = "LMCache's own client does not name the stack in its keys"
        return RemainingKeys(prefix, removed=False, why_not=why)
    try:
        store = UrlStore(parse_redis_url(url))
    except ValueError:
        return RemainingKeys(prefix, removed=False, why_not="its URL is invalid")
    with closing(store):
        try:
            if remove:
                return RemainingKeys(prefix, removed=True, keys=store.remove_keys(prefix))
            found = store.count_keys(prefix, within_s=_COUNT_S)
        except store.errors as exc:
            return RemainingKeys(prefix, removed=False, why_not=store.said(exc))
    return RemainingKeys(prefix, removed=False, keys=found.count, all_seen=found.all_seen)
