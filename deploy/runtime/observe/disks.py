"""Free space and permissions of folders that will be written to."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.doctor.seen import FolderSeen


def place(path: str | Path, *, ours: bool = True) -> FolderSeen:
    """Return space and permissions of a folder, or of its nearest existing parent.

    `ours` is False if another user than this one writes there.
    """
    folder = Path(path)
    there = next((one for one in (folder, *folder.parents) if one.is_dir()), None)
    free = free_mib(there) if there else None
    if there is None or free is None:
        return FolderSeen(str(path), None)
    return FolderSeen(str(path), free, os.access(there, os.W_OK | os.X_OK) if ours else None)


def free_mib(folder: Path) -> int | None:
    """Return the free space of a folder for this user; None if unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // 2**20
