"""This machine, from all probes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.planning.inventory import GpuVendor, Inventory
from deploy.runtime.detect.containers import container_gpus, read_cdi_kinds
from deploy.runtime.detect.tool import TIMEOUT_S, Tools
from deploy.runtime.host import cpu_flags, machine_memory_mib


def detect_inventory(
    docker_info: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    timeout_s: float = TIMEOUT_S,
) -> Inventory:
    """Return this machine's processors (those this process may use), memory and GPUs.

    Never raises for a tool that is missing, hangs or fails: `seen` says so.

    Args:
        docker_info: the Docker daemon's `info`, for `container_gpus`.
        environ: for PATH and the variables that hide GPUs; the process's own by default.
        root: below it lie /sys, /dev and /etc.
        timeout_s: for each tool that is asked.
    """
    from deploy.runtime.detect.amd import find_amd
    from deploy.runtime.detect.nvidia import find_nvidia

    host = detect_host(root)
    tools = Tools(os.environ if environ is None else environ, root, timeout_s)
    nvidia, amd = find_nvidia(tools, host.memory_mib), find_amd(tools, root)
    kinds = read_cdi_kinds(docker_info, root) if docker_info is not None else ()
    inventory = replace(
        host,
        gpus=(*nvidia.gpus, *amd.gpus),
        gpu_groups=amd.groups,
        container_gpus=container_gpus(docker_info, kinds),
        seen=(*nvidia.seen, *amd.seen),
        unusable=(*(("cuda",) if nvidia.unusable else ()), *(("rocm",) if amd.unusable else ())),
    )
    return _with_choice(inventory)


def detect_host(root: Path = Path("/")) -> Inventory:
    """Return this machine's processors (those this process may use) and memory; GPUs unasked."""
    flags = cpu_flags(root)
    return Inventory(
        cpus=len(os.sched_getaffinity(0)),
        memory_mib=machine_memory_mib(),
        fast_bfloat16=not flags or "avx512f" in flags,
    )


def _with_choice(inventory: Inventory) -> Inventory:
    if not (inventory.gpus_of("cuda") and inventory.gpus_of("rocm")):
        return inventory
    chosen = detected_vendor(inventory)
    line = f"GPUs of both vendors: 'auto' takes {chosen}, which has more GPU memory"
    return replace(inventory, seen=(*inventory.seen, line))


def detected_vendor(inventory: Inventory) -> str:
    """Return 'cuda', 'rocm' or 'cpu'; of two, the one whose GPUs have more memory in total."""

    def memory_mib(vendor: GpuVendor) -> int:
        return sum(gpu.memory_mib for gpu in inventory.gpus_of(vendor))

    if not inventory.gpus:
        return "cpu"
    return "rocm" if memory_mib("rocm") > memory_mib("cuda") else "cuda"
