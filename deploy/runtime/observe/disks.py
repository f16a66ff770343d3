"""Room and rights where something will be written."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.doctor.seen import Place


def place(path: str | Path, *, ours: bool = True) -> Place:
    """Return what is known of a folder, by the nearest one above it that is there.

    `ours` is False where another user than this one writes there.
    """
    folder = Path(path)
    there = next((one for one in (folder, *folder.parents) if one.is_dir()), None)
    if there is None:
        return Place(str(path), None)
    try:
        found = os.statvfs(there)
    except OSError:
        return Place(str(path), None)
    free = found.f_bavail * found.f_frsize // 2**20
    return Place(str(path), free, os.access(there, os.W_OK | os.X_OK) if ours else None)
