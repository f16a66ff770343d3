"""The folder that a result is kept in."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone
from pathlib import Path

from deploy.errors import MachineUnfit, UsageError
from deploy.runtime.home import Home
from deploy.workflows.running import require_stack


def open_folder(home: Home, name: str, workload: str, out: Path | None = None) -> Path:
    """Make and return the folder of a result of a stack.

    Raises:
        StateError: there is no such stack.
        UsageError: `out` is not an empty folder, or cannot be made.
    """
    topology = require_stack(home, name).prepared.plan.topology
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    folder = (out or home.bench / f"{stamp}-{topology}-{workload}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: the folder is not empty", hint="name a new one")
    except OSError as exc:
        raise UsageError(f"--out {folder}: {exc.strerror}", hint="name another folder") from exc
    return folder


def require_space(folder: Path, needed_bytes: int) -> None:
    """Check that a result will fit on its disk.

    Raises:
        MachineUnfit: it will not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise MachineUnfit(
            f"{free / 2**20:.0f} MiB are free in {folder}, and the result may take "
            f"{needed_bytes / 2**20:.0f} MiB",
            hint="free some space, or --out DIR on another disk",
        )
