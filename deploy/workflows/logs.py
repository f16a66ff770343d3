"""`deploy logs`: the last lines of each service, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.errors import PdkitError, StateError
from deploy.runtime.home import Home
from deploy.runtime.launcher import Launcher
from deploy.runtime.state import read_state_file
from deploy.workflows.running import launcher_for


@dataclass(frozen=True)
class LogLine:
    """One line of a log."""

    service: str
    line: str


@dataclass(frozen=True)
class Logs:
    """The last lines of logs.

    Attributes:
        files: service → the file, or the command that shows it.
    """

    files: Mapping[str, str]
    lines: Sequence[LogLine]


def log_source(home: Home, name: str) -> Launcher:
    """Return a reader of a stack's logs, also if its start failed: that is when logs matter.

    Raises:
        StateError: the stack has no logs.
    """
    files = home.stack(name)
    try:
        state = read_state_file(files.state_file, name)
    except PdkitError:
        state = None
    # Logs of a failed start are files, on both runtimes.
    source = launcher_for((state and state.runtime) or "process", name, files)
    if not source.logs():
        raise StateError(f"the stack '{name}' has no logs", hint=f"deploy up --name {name}")
    return source


def chosen_services(source: Launcher, name: str, service: str | None) -> tuple[str, ...]:
    """Return the services whose logs are asked for.

    Raises:
        StateError: there is no log of that service.
    """
    services = source.logs()
    if service is None:
        return services
    if service not in services:
        raise StateError(
            f"the stack '{name}' has no service '{service}'; it has: {', '.join(services)}",
            hint=f"deploy logs {services[0]} --name {name}",
        )
    return (service,)
