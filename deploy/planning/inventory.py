"""What planning must know of a machine: processors, memory and accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GpuVendor = Literal["cuda", "rocm"]

# On a machine with ROCm that has nothing else; the groups are "video" and "render" of Ubuntu 22.04.
FIRST_RENDER_MINOR = 128
ROCM_GROUPS = (44, 109)


@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    Attributes:
        index: the vendor tool's number, from 0; `device_ids` of a container uses it.
        uuid: CUDA only, such as 'GPU-5f3…'.
        render_node: ROCm only, such as '/dev/dri/renderD128'.
        arch: compute capability ('9.0') or gfx target ('gfx942'); "" if unknown.
    """

    index: int
    vendor: GpuVendor
    name: str
    memory_mib: int
    uuid: str = ""
    render_node: str = ""
    arch: str = ""


@dataclass(frozen=True)
class Inventory:
    """A machine's processors, memory and accelerators; detected, or from `--inventory FILE`.

    Attributes:
        fast_bfloat16: the processors compute bfloat16 faster than float32; False without AVX-512.
        gpu_groups: ROCm only: numbers of the groups that own /dev/kfd and the render nodes.
        container_gpus: how Docker can give GPUs to containers here: 'nvidia' (its runtime), and
            kinds of the Container Device Interface, such as 'nvidia.com/gpu'; empty if it
            cannot, or was not asked.
        seen: what detection looked at, one line each, for messages.
        unusable: vendors of which there are GPUs or a driver, and no GPU that can be used.
    """

    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    fast_bfloat16: bool = True
    gpu_groups: tuple[int, ...] = ()
    container_gpus: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    unusable: tuple[GpuVendor, ...] = ()

    def gpus_of(self, vendor: str) -> tuple[Gpu, ...]:
        """Return the GPUs of a vendor, in the order of their indices."""
        return tuple(
            sorted((gpu for gpu in self.gpus if gpu.vendor == vendor), key=lambda gpu: gpu.index)
        )


def inventory_from(values: Mapping[str, Any]) -> Inventory:
    """Return the inventory that plain values describe, as `dataclasses.asdict` writes them.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    names = ("gpu_groups", "container_gpus", "seen", "unusable")
    lists = {name: tuple(values.get(name, ())) for name in names}
    gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
    return Inventory(**{**values, **lists, "gpus": gpus})
