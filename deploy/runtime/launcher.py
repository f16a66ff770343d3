"""What every runtime can do with the services of one stack."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from deploy.errors import StackUnhealthy
from deploy.runtime.logs import LogReader
from deploy.runtime.secrets import Secret
from deploy.runtime.state import ServiceRecord
from deploy.runtime.store import ShardStore
from deploy.stack.service import Service, Stack

ServiceState = Literal["running", "exited", "not started"]
LOG_TAIL = 12
NO_RECORDS: Mapping[str, ServiceRecord] = MappingProxyType({})


class Started(Protocol):
    """A service that this command itself started."""

    @property
    def record(self) -> ServiceRecord:
        """What the state file keeps of it."""

    @property
    def started_monotonic(self) -> float:
        """When it was started, in seconds of `time.monotonic`."""

    @property
    def ended(self) -> str | None:
        """How it ended, in words; None while it runs."""


class Launcher(Protocol):
    """Starts, finds and ends the services of one stack."""

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the services."""

    def at_once(self) -> Launcher:
        """Return a launcher that tells how services are now, where asking for each takes long."""

    def prepare(self, stack: Stack, secrets: Mapping[str, Secret], *, stop_s: float) -> None:
        """Write down what the stack is, before any of it is started."""

    def start(self, service: Service, secrets: Mapping[str, Secret], *, starts: int = 1) -> Started:
        """Write the service's files and start it; anew if it has changed.

        Raises:
            MachineError: it cannot be started.
        """

    def keep_up(self, records: Mapping[str, ServiceRecord]) -> None:
        """From now on, let services restart when they die, if the runtime does that itself."""

    def take_front(self) -> socket.socket | None:
        """Return the router's listening socket if this command opened it; the caller closes it."""

    def holds(self, service: Service) -> bool:
        """Tell whether the stack itself listens on a service's port while that does not run."""

    def died(self, started: Started) -> StackUnhealthy:
        """Return the error for a service that ended during the start."""

    def state(self, record: ServiceRecord | None) -> ServiceState:
        """Return whether the service runs; without a record it was never started."""

    def pid(self, record: ServiceRecord) -> int:
        """Return the process ID of the service's first process; 0 if it does not run."""

    def uptime_s(self, record: ServiceRecord) -> float:
        """Return the seconds since its last start; 0.0 if it does not run."""

    def restarts(self, record: ServiceRecord) -> int:
        """Return its number of restarts since the start of the stack."""

    def resident_mib(self, record: ServiceRecord) -> int:
        """Return the memory that the service and all it started hold."""

    def environment(self, record: ServiceRecord) -> Mapping[str, str]:
        """Return the environment the service really runs with; empty if it does not run."""

    def arguments(self, record: ServiceRecord) -> tuple[str, ...]:
        """Return the command line the service really runs with; empty if it does not run."""

    def open_store(
        self, redis: Service, password: Secret | None
    ) -> AbstractContextManager[ShardStore]:
        """Open one Redis of the stack, which may be one of several that share the keys."""

    def where_log(self, name: str) -> str:
        """Return the path, or the command, by which a person reads the service's log."""

    def logs(self) -> tuple[str, ...]:
        """Return the names of the services that have a log."""

    def log_lines(self, name: str, count: int | None = None) -> tuple[str, ...]:
        """Return up to `count` last lines of a log, else all."""

    def log_reader(self, names: tuple[str, ...]) -> LogReader:
        """Return a reader of what these services write to their logs from now on."""

    def stop(self, records: Mapping[str, ServiceRecord], *, grace_s: float) -> None:
        """End the services together."""

    def require_own_name(self) -> None:
        """Check that the name this stack has in its runtime is not used by something else.

        Raises:
            MachineError: it is.
        """

    def marked(self) -> int:
        """Count the processes or containers with this stack's mark, also those in no state file."""

    def stop_marked(
        self, *, grace_s: float, records: Mapping[str, ServiceRecord] = NO_RECORDS
    ) -> int:
        """End all that has this stack's mark, also what is in no state file; return the count.

        Of `records`, those too whose mark cannot be seen.
        """

    def clear(self, *, keep_logs: bool) -> None:
        """Remove the stack's files, secrets included; keep its logs if `keep_logs`."""


def remove_files(root: Path, *, keep_logs: bool) -> None:
    """Remove a stack's folder, or all but its logs."""
    import shutil

    if not root.is_dir():
        root.unlink(missing_ok=True)  # something else lies in its place
    if not keep_logs:
        shutil.rmtree(root, ignore_errors=True)
        return
    for path in root.iterdir() if root.is_dir() else ():
        if path.name == "logs":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # logs are left in it, or it never existed
        root.rmdir()
