"""The limits that control groups put on this process: memory and processors, versions 1 and 2.

A group's limit holds for all groups below it, so every one from ours up to the root is looked at.
Inside a container its own group may be mounted as the root, with a path that is not there: whatever
of the path does not exist is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
_PROC = Path("/proc/self/cgroup")
# Version 1 has no word for "no limit": it is the largest number of whole pages.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class CgroupLimits:
    """What the groups allow; None if they do not limit it.

    Attributes:
        memory_bytes: the least of all limits.
        room_bytes: left up to the nearest limit; file pages that can be dropped count as room.
        cpus: number of processors that may be kept busy.
    """

    memory_bytes: int | None = None
    room_bytes: int | None = None
    cpus: float | None = None


def read_limits(mount: Path = MOUNT, proc: Path = _PROC) -> CgroupLimits:
    """Return the limits on this process; none where there are no control groups."""
    memory = list(_memory(mount, proc))
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        room_bytes=min((room for _, room in memory), default=None),
        cpus=min(_cpus(mount, proc), default=None),
    )


def _memory(mount: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and room of every group that limits memory."""
    for controller, names in (
        ("", ("memory.max", "memory.current", "inactive_file")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        limit_name, used_name, cache_name = names
        for group in _groups(mount, proc, controller):
            with suppress(OSError, ValueError):  # no such limit: no file, or the word "max" in it
                limit = int((group / limit_name).read_text())
                if limit < _NO_LIMIT:
                    used = int((group / used_name).read_text())
                    lines = (group / "memory.stat").read_text().splitlines()
                    stat = dict(line.split() for line in lines)
                    yield limit, limit - used + int(stat.get(cache_name, 0))


def _cpus(mount: Path, proc: Path) -> Iterator[float]:
    for group in _groups(mount, proc, ""):
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
    for group in _groups(mount, proc, "cpu"):
        with suppress(OSError, ValueError):
            old_quota = int((group / "cpu.cfs_quota_us").read_text())
            if old_quota > 0:
                yield old_quota / int((group / "cpu.cfs_period_us").read_text())


def _groups(mount: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our group and of those above it; "" is version 2's only tree."""
    top = mount / controller
    for part in (*_own_path(proc, controller), None):
        if part is None:
            yield top
        elif (folder := top / part).is_dir():
            yield folder


def _own_path(proc: Path, controller: str) -> list[str]:
    """Return our group and its parents, as paths below the root; [] if unknown."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    for line in lines:
        if len(line) == 3 and controller in line[1].split(","):
            parts = line[2].strip("/").split("/")
            return ["/".join(parts[:count]) for count in range(len(parts), 0, -1) if parts[0]]
    return []
