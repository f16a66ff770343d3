"""`deploy logs`: the last lines of each service, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.runtime.logs import follow, last_lines


def log_files(home: Home, name: str, service: str | None) -> dict[str, Path]:
    """Return service → log file. Also of a stack whose start failed: that is when logs matter.

    Raises:
        StateError: there are no logs, or none of that service.
    """
    folder = home.stack(name).logs_dir
    files = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not files:
        raise StateError(f"the stack '{name}' has no logs", hint=f"deploy up --name {name}")
    if service is None:
        return files
    if service not in files:
        raise StateError(
            f"the stack '{name}' has no service '{service}'; it has: {', '.join(files)}",
            hint=f"deploy logs {next(iter(files))} --name {name}",
        )
    return {service: files[service]}


def tail(files: dict[str, Path], count: int) -> list[tuple[str, str]]:
    """Return (service, line) for the last lines of each file."""
    return [(name, line) for name, path in files.items() for line in last_lines(path, count)]


def stream(files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield (service, line) as lines are written, until the caller stops asking."""
    return follow(files)
