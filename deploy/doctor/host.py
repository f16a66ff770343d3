"""Rules on kernel settings, process limits, CPUs and the clock."""

from __future__ import annotations

from deploy.config.runtimes import RUNTIMES
from deploy.doctor.finding import Rule, Verdict, fail, ok, unknown, warn
from deploy.doctor.observed import Seen
from deploy.planning.plan import Plan

# Measured on CPUs: with 64 no engine starts; with 200 one does, for a few clients.
_FILES_FAIL, _FILES_WARN = 65, 4096
_SHM_MIB_A_RANK = 1024
# No version of pdkit is older; before it, certificates are not valid yet.
_FIRST_RELEASE_S = 1_767_225_600.0  # 2026-01-01
_SHM = "/dev/shm"  # noqa: S108 - only its free space is read
_HEADS = "engines run as processes with the limits of this shell"


def _files(seen: Seen) -> Verdict | None:
    host = _of_processes(seen)
    if host is None or seen.host is None:
        return None
    limit = seen.host.open_files
    if limit is None or limit >= _FILES_WARN:
        return ok("no limit on open files" if limit is None else f"at most {limit} open files")
    return Verdict(
        "fail" if limit < _FILES_FAIL else "warn",
        f"at most {limit} open files (ulimit -n), and {_HEADS}",
        "Redis and the router refuse connections, and engines exit with 'Too many open files'",
        "ulimit -n 65536",
    )


def _of_processes(seen: Seen) -> Plan | None:
    """Return the plan if this shell's limits are those of the engines."""
    plan = seen.plan
    return plan if plan is not None and RUNTIMES[plan.runtime].as_user else None


def _locks(seen: Seen) -> Verdict | None:
    plan = _of_processes(seen)
    if plan is None or seen.host is None or not plan.vendor.has_gpus:
        return None
    limit, staging_kib = seen.host.locked_kib, int(plan.limits.staging_gib * 2**20)
    if limit is None or limit >= staging_kib:
        return ok("memory may be locked" + ("" if limit is None else f", at most {limit} KiB"))
    return warn(
        f"at most {limit} KiB may be locked (ulimit -l), staging needs {staging_kib}, and {_HEADS}",
        "staging memory that is not locked is copied twice on the way to a GPU; network and ROCm "
        "libraries refuse to start",
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf",
    )


def _huge_pages(seen: Seen) -> Verdict | None:
    if seen.host is None or not seen.host.huge_pages:
        return None
    setting = seen.host.huge_pages
    user_redis = seen.plan is not None and seen.plan.user_redis
    if setting != "always" or user_redis:
        return ok(
            f"transparent huge pages: {setting}" + ("; your own Redis runs elsewhere" * user_redis)
        )
    return warn(
        "transparent huge pages: always",
        "Redis stalls for milliseconds while the kernel merges and splits them",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _overcommit(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.host.overcommit is None:
        return None
    setting = seen.host.overcommit
    if setting != 2:
        return ok(f"vm.overcommit_memory is {setting}; pdkit's Redis never forks to save")
    return warn(
        "vm.overcommit_memory is 2",
        "engines reserve far more memory than they use, and fail although memory is free",
        "sudo sysctl vm.overcommit_memory=0",
    )


def shared_memory(seen: Seen) -> Verdict | None:
    """Judge whether the ranks of an engine, or its KV, fit into /dev/shm."""
    plan = _of_processes(seen)
    if plan is None or seen.host is None or seen.host.shm_free_mib is None:
        return None
    free, ranks = seen.host.shm_free_mib, plan.tp * len(plan.engines)
    kv = plan.shared_memory_peak_mib
    if free < kv:
        return fail(
            f"{_SHM} has {free} MiB free; the KV of the engines and of one more that restarts "
            f"takes {kv}",
            "an engine crashes with a bus error when it is full",
            "a smaller engine.kv_cache_gib or fewer engines; in a container: docker run "
            f"--shm-size; else: sudo mount -o remount,size={2 * kv}m {_SHM}",
        )
    needed = kv + (_SHM_MIB_A_RANK * ranks if plan.tp > 1 else 64)
    if free >= needed:
        also = f"; KV, with one engine restarting, takes {kv}" if kv else ""
        return ok(f"{_SHM} has {free} MiB free{also}")
    return warn(
        f"{_SHM} has {free} MiB free, and {ranks} ranks may use {needed}",
        "the ranks of an engine communicate through it, and crash with a bus error if it is full",
        "in a container: docker run --shm-size 16g; else: sudo mount -o remount,size=16g /dev/shm",
    )


def _numa(seen: Seen) -> Verdict | None:
    if seen.host is None or not seen.host.numa:
        return None
    nodes = seen.host.numa
    if len(nodes) == 1:
        return ok("one NUMA node")
    shown = "; ".join(f"node {node}: CPUs {cpus}" for node, cpus in nodes.items())
    has_gpus = seen.plan is not None and seen.plan.vendor.has_gpus
    if seen.host.numa_balancing and has_gpus:
        return warn(
            f"{shown}; the kernel moves pages between them",
            "moving pages stops GPU work that uses them: latency jumps",
            "sudo sysctl kernel.numa_balancing=0",
        )
    return ok(shown)


def _processors(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.plan is None or seen.plan.vendor.has_gpus:
        return None
    host = seen.host
    if host.architecture != "x86_64" or not host.cpu_flags:
        return unknown(f"pdkit does not know the features of {host.architecture} CPUs")
    if "avx2" not in host.cpu_flags:
        return fail(
            "the CPU has no AVX2",
            "vLLM's CPU code does not run on it",
            "use another machine; a virtual machine may hide it: -cpu host",
        )
    if "avx512f" not in host.cpu_flags:
        return warn(
            "the CPU has AVX2 but no AVX-512",
            "vLLM uses its slower kernels",
            "a virtual machine may hide it: -cpu host",
        )
    named = {"AVX-512": "avx512f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
    return ok(", ".join(name for name, flag in named.items() if flag in host.cpu_flags))


def _quota(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.plan is None:
        return None
    host, engines = seen.host, seen.plan.engines
    if host.cpu_quota is None or host.cpu_quota >= host.cpus:
        return ok(f"{host.cpus} CPUs, no lower quota")
    threads = max(1, int(host.cpu_quota) // (len(engines) * seen.plan.tp))
    return warn(
        f"a control group limits CPU time to {host.cpu_quota:g} CPUs, but {host.cpus} are visible",
        "engines start a thread per visible CPU, and all stall when the quota is used up",
        f'engine: {{env: {{OMP_NUM_THREADS: "{threads}"}}}} in deploy.yaml, or a larger quota',
    )


def _clock(seen: Seen) -> Verdict | None:
    if seen.host is None or seen.host.now is None:
        return None
    if seen.host.now < _FIRST_RELEASE_S:
        return warn(
            "the clock is set to a date before pdkit's first release",
            "certificates of servers are not valid yet, and log times are wrong",
            "sudo timedatectl set-ntp true, or sudo date -s TIME",
        )
    if seen.host.synced is False:
        return warn(
            "the clock is not synchronized with a time server",
            "logs of several machines cannot be compared",
            "sudo timedatectl set-ntp true",
        )
    return ok(
        "synchronized with a time server"
        if seen.host.synced
        else "plausible date; synchronization unknown"
    )


RULES = (
    Rule(
        "host.files", _files,
        looks_at="the limit on open files, for processes (containers have their own limits)",
        fails="64 or fewer", warns="fewer than 4096", fix="`ulimit -n 65536`",
    ),
    Rule(
        "host.locks", _locks,
        looks_at="how much memory may be locked, for processes on GPUs",
        warns="less than an engine's staging memory", fix="`ulimit -l unlimited`",
    ),
    Rule(
        "host.huge_pages", _huge_pages,
        looks_at="transparent huge pages",
        warns="they are `always`, which makes Redis stall",
        fix="`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
    ),
    Rule(
        "host.overcommit", _overcommit,
        looks_at="`vm.overcommit_memory`", warns="it is 2",
        fix="`sudo sysctl vm.overcommit_memory=0`",
    ),
    Rule(
        "host.shm", shared_memory,
        looks_at="free space in `/dev/shm`, for processes",
        fails="with `--connector lmcache-mp`: less than the KV of the engines and one more",
        warns="otherwise, less than 1 GiB per rank with `--tp`, or 64 MiB without",
        fix="`--shm-size` or a remount",
    ),
    Rule(
        "host.numa", _numa,
        looks_at="NUMA nodes and their CPUs",
        warns="there are several, engines use GPUs, and the kernel moves pages between them",
        fix="`sudo sysctl kernel.numa_balancing=0`",
    ),
    Rule(
        "host.cpu", _processors,
        looks_at="AVX2, AVX-512, bfloat16 and AMX, for engines on CPUs",
        fails="no AVX2", warns="no AVX-512", fix="another machine, or `-cpu host`",
    ),
    Rule(
        "host.quota", _quota,
        looks_at="visible CPUs against the control group's quota (versions 1 and 2)",
        warns="the quota is lower", fix="`OMP_NUM_THREADS` in `engine.env`, or a larger quota",
    ),
    Rule(
        "host.clock", _clock,
        looks_at="the date, and whether it is synchronized with a time server",
        warns="it is before 2026, or not synchronized", fix="`timedatectl set-ntp true`",
    ),
)  # fmt: skip
