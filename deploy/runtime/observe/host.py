"""The kernel's settings, limits of this process, processors, the clock, and folders' free space."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.doctor.observed import FolderSeen, HostSeen
from deploy.runtime.cgroup import CgroupLimits, read_limits
from deploy.runtime.detect.tool import Tools
from deploy.runtime.host import cpu_flags, text_of

_CLOCK_TIMEOUT_S = 2.0


def see_host(root: Path = Path("/"), limits: CgroupLimits | None = None) -> HostSeen:
    """Read the kernel's settings from files.

    Args:
        root: below it lie /proc, /sys and /dev.
        limits: of control groups; this process's own by default.
    """
    nodes = _nodes(root)
    quota = (limits or read_limits()).cpus
    return HostSeen(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_kib=_kib(_soft(resource.RLIMIT_MEMLOCK)),
        huge_pages=_bracketed(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        overcommit=_number(text_of(root / "proc/sys/vm/overcommit_memory")),
        shm_free_mib=free_mib(root / "dev/shm"),
        architecture=platform.machine(),
        cpu_flags=cpu_flags(root),
        numa=nodes,
        numa_balancing=_number(text_of(root / "proc/sys/kernel/numa_balancing")) == 1,
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=quota,
        now=time.time(),
    )


def clock_is_synced(tools: Tools | None = None) -> bool | None:
    """Return whether a time server sets the clock; None if unknown."""
    asked = tools or Tools(os.environ, timeout_s=_CLOCK_TIMEOUT_S)
    answer = asked.ask("timedatectl", "show", "--property=NTPSynchronized", "--value")
    return {"yes": True, "no": False}.get(answer.stdout.strip())


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _kib(count: int | None) -> int | None:
    return None if count is None else count // 1024


def _bracketed(text: str) -> str:
    """Return 'madvise' of 'always [madvise] never'."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def _nodes(root: Path) -> Mapping[int, str]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    numbered = sorted((int(folder.name.removeprefix("node")), folder) for folder in folders)
    return {number: text_of(folder / "cpulist").strip() for number, folder in numbered}


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


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
