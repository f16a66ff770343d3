"""AMD GPUs, as the kernel's compute driver (KFD) lists them in /sys.

ROCm's runtime reads the same list: its order is the order of HIP's indices, and its memory is what
HIP can have, which for a partition of a GPU is a part of the GPU's.
Format: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.runtime.host import text_of

_NODES = Path("sys/class/kfd/kfd/topology/nodes")
_DEVICE = Path("dev/kfd")
# Memory on the GPU itself, in reach of the CPU or not; 0 would be the host's.
_OWN_HEAPS = (1, 2)


@dataclass(frozen=True)
class KfdGpu:
    """A GPU, or a partition of one.

    Attributes:
        node: its number in the kernel's list, which also counts processors.
        memory_mib: 0 if the kernel names none.
        pci: '0000:c1:00.0'; partitions of a GPU share it.
        uuid: 'GPU-…', as ROCR_VISIBLE_DEVICES takes it; "" if the GPU has none.
    """

    node: int
    arch: str
    memory_mib: int
    render_node: str
    pci: str
    uuid: str


def parse_properties(text: str) -> dict[str, int]:
    """Return the numbers of a `properties` file: a name and a decimal number on each line."""
    pairs = (line.split() for line in text.splitlines())
    return {
        pair[0]: int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[1].isascii() and pair[1].isdigit()
    }


def gfx_target(version: int) -> str:
    """Return 'gfx90a' for 90010: two decimal digits each for minor and stepping, printed in hex."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}" if major else ""


def kfd_gpu(node: int, properties: dict[str, int], bank_bytes: int) -> KfdGpu | None:
    """Return the GPU of a node, or None if the node is a processor."""
    if not properties.get("simd_count"):
        return None
    minor = properties.get("drm_render_minor", 0)
    unique = properties.get("unique_id", 0)
    return KfdGpu(
        node=node,
        arch=gfx_target(properties.get("gfx_target_version", 0)),
        memory_mib=bank_bytes // 2**20,
        render_node=f"/dev/dri/renderD{minor}" if minor else "",
        pci=_pci(properties.get("domain", 0), properties.get("location_id", 0)),
        uuid=f"GPU-{unique:016x}" if unique else "",
    )


def _pci(domain: int, location: int) -> str:
    """Return a PCI address; the bits above its 16 hold the number of a partition."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def own_bytes(banks: Iterable[str]) -> int:
    """Return the bytes of memory on the GPU itself, from its banks' `properties` files."""
    parsed = [parse_properties(text) for text in banks]
    return sum(
        bank.get("size_in_bytes", 0) for bank in parsed if bank.get("heap_type") in _OWN_HEAPS
    )


def read_kfd(root: Path = Path("/")) -> tuple[KfdGpu, ...]:
    """Return the GPUs that ROCm can open here, in its order; none where there is no driver.

    A GPU that was not given to this container has no render node in it, or cannot be read.
    """
    try:
        nodes = sorted((root / _NODES).iterdir(), key=lambda path: _number(path.name))
    except OSError:
        return ()
    found = (_read_node(node) for node in nodes)
    return tuple(
        gpu for gpu in found if gpu and gpu.render_node and _below(root, gpu.render_node).exists()
    )


def _read_node(node: Path) -> KfdGpu | None:
    properties = parse_properties(text_of(node / "properties"))
    banks = [text_of(bank) for bank in sorted(node.glob("mem_banks/*/properties"))]
    return kfd_gpu(_number(node.name), properties, own_bytes(banks))


def device_present(root: Path = Path("/")) -> bool:
    """Return whether /dev/kfd is there: without it, ROCm has no GPU."""
    return (root / _DEVICE).exists()


def device_groups(render_nodes: Iterable[str], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the numbers of the groups that own /dev/kfd and these render nodes, in order.

    Root's own is left out unless it is the only one: a container's user needs no group for it.
    """
    groups: set[int] = set()
    for path in (root / _DEVICE, *(_below(root, node) for node in render_nodes)):
        try:
            groups.add(path.stat().st_gid)
        except OSError:
            continue
    return tuple(sorted(groups - {0} or groups))


def may_open(root: Path = Path("/")) -> bool:
    """Return whether this user may open /dev/kfd."""
    return os.access(root / _DEVICE, os.R_OK | os.W_OK)


def product_name(gpu: KfdGpu, root: Path = Path("/")) -> str:
    """Return the name that a server GPU carries itself, or ""."""
    card = root / "sys/class/drm" / Path(gpu.render_node).name / "device"
    return text_of(card / "product_name").strip()


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() else -1
