"""Which GPU each engine gets, and how much of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.config.spec import StackSpec
from deploy.config.vendors import Vendor
from deploy.errors import Changes, MissingGpus, NamedSetting, Words
from deploy.planning.inventory import FIRST_RENDER_MINOR, ROCM_GROUPS, Gpu, Inventory
from deploy.planning.topology import NO_SPLIT, Topology, gpus_needed, resolve_topology

# What a plan assumes on a machine without the hardware.
ASSUMED_GPU_MIB = 80 * 1024
_NO_GPUS: Changes = {"--vendor": "cpu", "--image": None}


@dataclass(frozen=True)
class GpuNeed:
    """What a spec's topology needs of a machine.

    Attributes:
        seen: how many GPUs of the vendor the machine has.
        needed: how many the stack takes: 0 on CPUs, 1 if all engines share one.
    """

    topology: Topology
    seen: int
    needed: int


def gpu_need(spec: StackSpec, vendor: Vendor, inventory: Inventory) -> GpuNeed:
    """Return the topology that a spec asks for on a machine, and the GPUs that it takes.

    Raises:
        ConfigError: the spec contradicts itself.
    """
    seen = len(inventory.gpus_of(vendor.name))
    topology = resolve_topology(spec, vendor, seen)
    return GpuNeed(topology, seen, gpus_needed(spec, vendor, topology, seen))


def require_cpus_meant(spec: StackSpec, inventory: Inventory) -> None:
    """Check that a machine without usable GPUs may run engines on CPUs though nobody chose that.

    Raises:
        MissingGpus: GPUs are asked for, or are there and cannot be used.
    """
    if spec.gpus is not None:
        why: Words = (NamedSetting("gpus"), f" {spec.gpus}, but no usable GPU was found")
    elif inventory.unusable:
        why = ("this machine has a GPU, but none is usable",)
    else:
        return
    raise MissingGpus(
        why,
        retry=(_NO_GPUS,),
        note="for engines on CPUs",
        hint="deploy plan --inventory FILE for another machine",
        details=inventory.seen,
    )


def with_assumed_gpus(inventory: Inventory, vendor: Vendor, count: int) -> Inventory:
    """Return the inventory with `count` GPUs of the vendor, where it has fewer.

    All have 80 GiB, whatever the vendor, so that plans for two vendors differ in nothing else.
    """
    if not vendor.has_gpus or len(inventory.gpus_of(vendor.name)) >= count:
        return inventory
    gpus = tuple(
        Gpu(
            index=index,
            vendor="rocm" if vendor.name == "rocm" else "cuda",
            name="assumed",
            memory_mib=ASSUMED_GPU_MIB,
            render_node=f"/dev/dri/renderD{FIRST_RENDER_MINOR + index}"
            if vendor.name == "rocm"
            else "",
        )
        for index in range(count)
    )
    groups = inventory.gpu_groups or (ROCM_GROUPS if vendor.name == "rocm" else ())
    return replace(
        inventory,
        gpus=gpus,
        gpu_groups=groups,
        seen=(
            *inventory.seen,
            f"assumed: {count} GPU{'s' if count > 1 else ''} of {ASSUMED_GPU_MIB // 1024} GiB",
        ),
    )


def allot(
    inventory: Inventory, vendor: Vendor, *, engines: int, ranks: int, needed: int
) -> tuple[tuple[Gpu, ...], ...]:
    """Return each engine's GPUs: `ranks` different ones per engine, or one GPU that all share.

    Raises:
        MissingGpus: there are fewer than `needed`; the message says what was seen.
    """
    if not vendor.has_gpus:
        return ((),) * engines
    there = inventory.gpus_of(vendor.name)
    if len(there) < needed:
        raise _too_few(inventory, vendor, needed, len(there), ranks)
    if needed == 1:
        return (there[:1],) * engines
    return tuple(there[first : first + ranks] for first in range(0, engines * ranks, ranks))


@dataclass(frozen=True)
class GpuMemory:
    """What each engine may use of each of its GPUs.

    Attributes:
        share: the part of the GPU's memory.
        memory_mib: the whole memory of the smallest GPU.
        shared: other engines are on it, too.
    """

    share: float
    memory_mib: int
    shared: bool


def gpu_memory(given: Sequence[Sequence[Gpu]], share: float) -> GpuMemory | None:
    """Divide `share` of a GPU's memory equally between the engines on it; None without GPUs."""
    held = [gpu.index for gpus in given for gpu in gpus]
    if not held:
        return None
    sharers = max(map(held.count, held))
    smallest = min(gpu.memory_mib for gpus in given for gpu in gpus)
    # Rounded down, so that together they do not ask for more than there is.
    return GpuMemory(int(1000 * share / sharers) / 1000, smallest, sharers > 1)


def _too_few(
    inventory: Inventory, vendor: Vendor, needed: int, there: int, ranks: int
) -> MissingGpus:
    return MissingGpus(
        (
            f"{needed} GPU{'s' if needed > 1 else ''} needed for ",
            NamedSetting("vendor"),
            f" {vendor.name}, {there or 'none'} found",
        ),
        retry=({**NO_SPLIT, **_most(there, ranks)} if there else _otherwise(inventory, vendor),),
        hint="" if there else "deploy plan --inventory FILE for another machine",
        details=inventory.seen,
    )


def _otherwise(inventory: Inventory, vendor: Vendor) -> Changes:
    """Return the vendor of the GPUs that are there, else CPUs."""
    others = {gpu.vendor for gpu in inventory.gpus} - {vendor.name}
    return {"--vendor": min(others), "--image": None} if others else _NO_GPUS


def _most(there: int, ranks: int) -> Changes:
    """Return the options of the largest stack on this many GPUs, with a smaller TP if necessary."""
    if there < 2 * ranks:
        fewer = max(n for n in (1, 2, 4, 8, 16, 32) if 2 * n <= max(2, there))
        return {"--gpus": str(min(there, 2 * fewer)), "--tp": str(fewer)}
    return {"--gpus": str(there // ranks * ranks)}
