"""Rules on the kernel's settings, the limits of this process, processors and the clock."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, ok, unknown
from deploy.doctor.seen import Seen
from deploy.planning.plan import Plan

# Tried on processors: with 64 no engine starts, and with 200 one does, for a few clients.
_FILES_FAIL, _FILES_WARN = 65, 4096
_SHM_MIB_A_RANK = 1024
# No version of the kit is older: before it, certificates are not valid yet.
_FIRST_RELEASE_S = 1_767_225_600.0  # 2026-01-01
_SHM = "/dev/shm"  # noqa: S108 - its room is looked at, nothing is put there
_HEADS = "engines are processes and have the limits of this shell"


def files(seen: Seen) -> Verdict | None:
    host = _of_processes(seen)
    if host is None or seen.host is None:
        return None
    limit = seen.host.open_files
    if limit is None or limit >= _FILES_WARN:
        return ok("no limit on open files" if limit is None else f"{limit} files may be open")
    return Verdict(
        "fail" if limit < _FILES_FAIL else "warn",
        f"{limit} files may be open (ulimit -n), and {_HEADS}",
        "Redis and the router refuse connections, and engines end with 'Too many open files'",
        "ulimit -n 65536",
    )


def _of_processes(seen: Seen) -> Plan | None:
    """Return the plan if this shell's limits are those of the engines."""
    return seen.plan if seen.plan is not None and seen.plan.runtime == "process" else None


def locks(seen: Seen) -> Verdict | None:
    plan = _of_processes(seen)
    if plan is None or seen.host is None or not plan.vendor.has_gpus:
        return None
    limit, staging_kib = seen.host.locked_kib, int(plan.limits.staging_gib * 2**20)
    if limit is None or limit >= staging_kib:
        return ok("memory may be locked" + ("" if limit is None else f", {limit} KiB of it"))
    return Verdict(
        "warn",
        f"{limit} KiB may be locked (ulimit -l), staging has {staging_kib}, and {_HEADS}",
        "staging memory that is not locked is copied twice on its way to a GPU; libraries of "
        "networks and ROCm refuse to start",
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf",
    )


def huge_pages(seen: Seen) -> Verdict | None:
    if seen.host is None or not seen.host.huge_pages:
        return None
    setting = seen.host.huge_pages
    brought = seen.plan is not None and seen.plan.redis_brought
    if setting != "always" or brought:
        return ok(f"transparent huge pages: {setting}" + ("; Redis is elsewhere" * brought))
    return Verdict(
        "warn",
        "transparent huge pages: always",
        "Redis stalls for milliseconds while the kernel makes and splits them",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def overcommit(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.host.overcommit is None:
        return None
    setting = seen.host.overcommit
    if setting != 2:
        return ok(f"vm.overcommit_memory is {setting}; the kit's Redis never forks to save")
    return Verdict(
        "warn",
        "vm.overcommit_memory is 2",
        "engines reserve far more addresses than they use, and are refused while memory is free",
        "sudo sysctl vm.overcommit_memory=0",
    )


def shared_memory(seen: Seen) -> Verdict | None:
    plan = _of_processes(seen)
    if plan is None or seen.host is None or seen.host.shm_free_mib is None:
        return None
    free, ranks = seen.host.shm_free_mib, plan.tp * len(plan.engines)
    needed = _SHM_MIB_A_RANK * ranks if plan.tp > 1 else 64
    if free >= needed:
        return ok(f"{_SHM} has {free} MiB free")
    return Verdict(
        "warn",
        f"{_SHM} has {free} MiB free, and {ranks} ranks may use {needed}",
        "the ranks of an engine talk through it, and end with a bus error where it is full",
        "docker run --shm-size 16g where this is a container; else: sudo mount -o "
        "remount,size=16g /dev/shm",
    )


def numa(seen: Seen) -> Verdict | None:
    if seen.host is None or not seen.host.numa:
        return None
    nodes = seen.host.numa
    if len(nodes) == 1:
        return ok("one NUMA node")
    shown = "; ".join(f"node {node}: CPUs {cpus}" for node, cpus in nodes.items())
    has_gpus = seen.plan is not None and seen.plan.vendor.has_gpus
    if seen.host.numa_balancing and has_gpus:
        return Verdict(
            "warn",
            f"{shown}; the kernel moves pages between them",
            "moving pages stops GPU work that uses them: latency jumps",
            "sudo sysctl kernel.numa_balancing=0",
        )
    return ok(shown)


def processors(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.plan is None or seen.plan.vendor.has_gpus:
        return None
    host = seen.host
    if host.architecture != "x86_64" or not host.cpu_flags:
        return unknown(f"what a processor of {host.architecture} can do is not known to the kit")
    if "avx2" not in host.cpu_flags:
        return Verdict(
            "fail",
            "the processor has no AVX2",
            "vLLM's code for processors does not run on it",
            "another machine, or a virtual machine that shows the host's processor (-cpu host)",
        )
    if "avx512f" not in host.cpu_flags:
        return Verdict(
            "warn",
            "the processor has AVX2 and no AVX-512",
            "vLLM takes its slower kernels",
            "a virtual machine may hide it: -cpu host",
        )
    named = {"AVX-512": "avx512f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
    return ok(", ".join(name for name, flag in named.items() if flag in host.cpu_flags))


def quota(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.plan is None:
        return None
    host, engines = seen.host, seen.plan.engines
    if host.cpu_quota is None or host.cpu_quota >= host.cpus:
        return ok(f"{host.cpus} processors, no quota below that")
    threads = max(1, int(host.cpu_quota) // (len(engines) * seen.plan.tp))
    return Verdict(
        "warn",
        f"a control group leaves the time of {host.cpu_quota:g} processors, and {host.cpus} show",
        "engines start a thread for each that they see, and all stop when the quota is spent",
        f'engine: {{env: {{OMP_NUM_THREADS: "{threads}"}}}} in deploy.yaml, or a larger quota',
    )


def clock(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.host.now is None:
        return None
    if seen.host.now < _FIRST_RELEASE_S:
        return Verdict(
            "warn",
            "the clock is before the kit's first release",
            "certificates of hubs and registries are not valid yet, and times in logs lie",
            "sudo timedatectl set-ntp true, or sudo date -s TIME",
        )
    if seen.host.synced is False:
        return Verdict(
            "warn",
            "the clock is not set by a time server",
            "logs of several machines cannot be put side by side",
            "sudo timedatectl set-ntp true",
        )
    return ok(
        "set by a time server" if seen.host.synced else "a sane date; nothing says who set it"
    )


RULES = (
    Rule(
        "host.files", files,
        looks_at="how many files may be open, where engines are processes (containers have limits "
        "of their own)",
        fails="64 or fewer", warns="fewer than 4096", fix="`ulimit -n 65536`",
    ),
    Rule(
        "host.locks", locks,
        looks_at="how much memory may be locked, where engines are processes on GPUs",
        warns="less than an engine's staging memory", fix="`ulimit -l unlimited`",
    ),
    Rule(
        "host.huge_pages", huge_pages,
        looks_at="transparent huge pages",
        warns="they are `always`, which makes Redis stall",
        fix="`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
    ),
    Rule(
        "host.overcommit", overcommit,
        looks_at="`vm.overcommit_memory`", warns="it is 2",
        fix="`sudo sysctl vm.overcommit_memory=0`",
    ),
    Rule(
        "host.shm", shared_memory,
        looks_at="`/dev/shm`, where engines are processes",
        warns="less than 1 GiB a rank with `--tp`, else 64 MiB", fix="`--shm-size` or a remount",
    ),
    Rule(
        "host.numa", numa,
        looks_at="NUMA nodes and their processors",
        warns="there are several, the engines use GPUs, and the kernel balances pages",
        fix="`sudo sysctl kernel.numa_balancing=0`",
    ),
    Rule(
        "host.cpu", processors,
        looks_at="AVX2, AVX-512, bfloat16 and AMX, where engines run on processors",
        fails="no AVX2", warns="no AVX-512", fix="another machine, or `-cpu host`",
    ),
    Rule(
        "host.quota", quota,
        looks_at="processors against the quota of a control group (versions 1 and 2)",
        warns="the quota is lower", fix="`OMP_NUM_THREADS` in `engine.env`, or a larger quota",
    ),
    Rule(
        "host.clock", clock,
        looks_at="the date, and whether a time server sets it",
        warns="it is before 2026, or no time server sets it", fix="`timedatectl set-ntp true`",
    ),
)  # fmt: skip
