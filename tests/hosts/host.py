"""What a process sees of its machine. Run as a program, prints that as JSON."""

from __future__ import annotations

import json
import locale
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.compose_plugin import compose_plugin

REPO = Path(__file__).resolve().parents[2]
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
ONLINE = Path("/sys/devices/system/cpu/online")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """The facts that a disguise changes.

    Attributes:
        vectors: the widest vector instructions: avx512f or avx2.
        cgroup: the version of the control groups; 0 if there are both or neither.
        decimal_point: by the locale.
        utc_offset_s: on 1 January 2026.
        plugins: the folder of Compose: DOCKER_CONFIG, HOME or elsewhere; "" without `docker`.
    """

    vectors: str
    cores: int
    one_core_usable: bool
    memory_mib: int
    cgroup: int
    ipv6: bool
    locale: str
    decimal_point: str
    utc_offset_s: int
    home: bool
    root: bool
    source_writable: bool
    plugins: str


def this_host() -> Host:
    """Look at the machine as this process sees it."""
    words = CPUINFO.read_text().split()
    return Host(
        vectors=next((flag for flag in ("avx512f", "avx2") if flag in words), ""),
        cores=os.cpu_count() or 0,
        one_core_usable=len(os.sched_getaffinity(0)) == 1,
        memory_mib=psutil.virtual_memory().total // 2**20,
        cgroup=_cgroup_version(),
        ipv6=_has_ipv6(),
        locale=locale.setlocale(locale.LC_ALL, ""),
        decimal_point=str(locale.localeconv()["decimal_point"]),
        utc_offset_s=time.localtime(1_767_225_600).tm_gmtoff,
        home="HOME" in os.environ,
        root=os.getuid() == 0,
        source_writable=os.access(REPO / "tests", os.W_OK),
        plugins=_plugins() if shutil.which("docker") else "",
    )


def _cgroup_version() -> int:
    is_there = {1: (CGROUP / "memory").is_dir(), 2: (CGROUP / "memory.max").exists()}
    versions = [version for version, there in is_there.items() if there]
    return versions[0] if len(versions) == 1 else 0


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _plugins() -> str:
    file = compose_plugin()
    for variable in ("DOCKER_CONFIG", "HOME"):
        folder = os.environ.get(variable)
        if file and folder and file.is_relative_to(folder):
            return variable
    return "elsewhere" if file else "nowhere"


if __name__ == "__main__":
    print(json.dumps(asdict(this_host())))
