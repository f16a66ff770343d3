"""The disguises. What is independent is combined, so that two of them cover everything."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.hosts.host import Host

GIB = 2**30


@dataclass(frozen=True)
class Disguise:
    """A machine to look like.

    Attributes:
        shows: what a process in it sees.
        flags: of the processor, beside those that every processor with AVX2 has.
        cgroup_files: in /sys/fs/cgroup, instead of the machine's.
        environ: variables to set.
        inherits: whether the caller's other variables stay, rather than only PATH.
    """

    shows: Host
    flags: tuple[str, ...]
    cgroup_files: Mapping[str, str]
    environ: Mapping[str, str] = field(default_factory=dict)
    inherits: bool = True

    @property
    def host(self) -> Host:
        """What is to be seen here, where `docker` may not be installed."""
        return self.shows if shutil.which("docker") else replace(self.shows, plugins="")


DISGUISES = {
    "small": Disguise(
        Host(
            vectors="avx512f", cores=1, one_core_usable=True, memory_mib=4096, cgroup=1, ipv6=False,
            locale="C", decimal_point=".", utc_offset_s=14 * 3600, home=False, root=False,
            source_writable=False, plugins="DOCKER_CONFIG",
        ),
        flags=("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16", "amx_tile"),
        cgroup_files={
            "memory/memory.limit_in_bytes": str(3 * GIB),
            "memory/memory.usage_in_bytes": str(GIB),
            "memory/memory.stat": "total_inactive_file 4096\n",
            "cpu/cpu.cfs_quota_us": "50000",
            "cpu/cpu.cfs_period_us": "100000",
        },
        # Kiritimati and Newfoundland, by rules that need no package of time zones.
        environ={"LC_ALL": "C", "TZ": "<+14>-14"},
        inherits=False,
    ),
    "large": Disguise(
        Host(
            vectors="avx2", cores=64, one_core_usable=False, memory_mib=2**20, cgroup=2,
            ipv6=True, locale="de_DE.UTF-8", decimal_point=",", utc_offset_s=-12600, home=True,
            root=True, source_writable=True, plugins="HOME",
        ),
        flags=(),
        cgroup_files={
            "memory.max": str(512 * GIB),
            "memory.current": str(GIB),
            "memory.stat": "inactive_file 4096\n",
            "cpu.max": "3200000 100000\n",
        },
        environ={
            "LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8", "TZ": "NST3:30NDT,M3.2.0,M11.1.0",
        },
    ),
}  # fmt: skip
