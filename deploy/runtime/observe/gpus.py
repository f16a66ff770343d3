"""GPU drivers, permissions, memory in use and NUMA nodes.

For NVIDIA's GPUs nvidia-smi is asked; for AMD's the kernel tells all of it in files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.doctor.observed import GpuMemoryUse, GpusSeen
from deploy.planning.inventory import Gpu
from deploy.runtime.detect.amd import KfdGpu, read_kfd
from deploy.runtime.detect.nvidia import cells
from deploy.runtime.detect.tool import ToolOutput, Tools
from deploy.runtime.host import text_of

TIMEOUT_S = 5.0
_USE = ("index", "uuid", "memory.used", "driver_version", "pci.bus_id")
_HOLDERS = ("gpu_uuid", "pid", "process_name", "used_memory")
# Newer drivers tell the user-mode driver's CUDA and the kernel's apart.
_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)")
_QUERIES = (
    (f"--query-gpu={','.join(_USE)}", "--format=csv,noheader,nounits"),
    (f"--query-compute-apps={','.join(_HOLDERS)}", "--format=csv,noheader,nounits"),
    (),
)
_KFD_PROCESSES = Path("sys/class/kfd/kfd/proc")
_KFD_NODES = Path("sys/class/kfd/kfd/topology/nodes")


def see_gpus(gpus: Iterable[Gpu], tools: Tools | None = None, root: Path = Path("/")) -> GpusSeen:
    """Observe the GPUs of a plan, all of one vendor."""
    ours = list(gpus)
    if not ours:
        return GpusSeen()
    if ours[0].vendor == "rocm":
        return _amd(ours, root)
    return _nvidia(ours, tools or Tools(os.environ, timeout_s=TIMEOUT_S), root)


def _nvidia(gpus: list[Gpu], tools: Tools, root: Path) -> GpusSeen:
    with ThreadPoolExecutor(len(_QUERIES)) as pool:  # each call wakes the driver
        listed, holders, page = pool.map(lambda words: tools.ask("nvidia-smi", *words), _QUERIES)
    rows = [cells(line, len(_USE)) for line in listed.stdout.splitlines()]
    by_index = {int(row[0]): row for row in rows if row and row[0].isdigit()}
    held = _holders(holders)
    uses = tuple(
        GpuMemoryUse("cuda", gpu.index, _mib(row[2]), held.get(row[1], ()))
        for gpu in gpus
        if (row := by_index.get(gpu.index))
    )
    nodes = {index: _pci_node(row[4], root) for index, row in by_index.items()}
    cuda = _CUDA.search(page.stdout)
    return GpusSeen(
        driver=next((row[3] for row in by_index.values()), ""),
        cuda=cuda[1] if cuda else "",
        uses=uses,
        nodes={index: node for index, node in nodes.items() if node >= 0},
        trouble=listed.problem or page.problem,
    )


def _holders(answer: ToolOutput) -> Mapping[str, tuple[str, ...]]:
    """Return GPU's uuid → 'pid 7 (python), 400 MiB' of each process that computes there."""
    found: dict[str, tuple[str, ...]] = {}
    for line in answer.stdout.splitlines():
        row = cells(line, len(_HOLDERS))
        if row and row[1].isdigit():
            memory = f", {row[3]} MiB" if row[3].isdigit() else ""
            text = f"pid {row[1]} ({Path(row[2]).name}){memory}"
            found[row[0]] = (*found.get(row[0], ()), text)
    return found


def _mib(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _pci_node(address: str, root: Path) -> int:
    """Return the NUMA node of a PCI address as nvidia-smi writes it; -1 if none is told."""
    domain, _, rest = address.lower().partition(":")
    return _numa_node(root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}")


def _amd(gpus: list[Gpu], root: Path) -> GpusSeen:
    by_node = {gpu.render_node: gpu for gpu in read_kfd(root)}
    held = _kfd_holders(root)
    uses, nodes = [], {}
    for gpu in gpus:
        card = root / "sys/class/drm" / Path(gpu.render_node).name / "device"
        used = text_of(card / "mem_info_vram_used").strip()
        known = by_node.get(gpu.render_node)
        holders = held.get(_kfd_id(known, root), ()) if known else ()
        uses.append(
            GpuMemoryUse("rocm", gpu.index, int(used) >> 20 if used.isdigit() else None, holders)
        )
        nodes[gpu.index] = _numa_node(card)
    paths = ["/dev/kfd", *(gpu.render_node for gpu in gpus)]
    return GpusSeen(
        driver=text_of(root / "sys/module/amdgpu/version").strip(),
        uses=tuple(uses),
        closed=tuple(path for path in paths if not _opens(root, path)),
        nodes={index: node for index, node in nodes.items() if node >= 0},
    )


def _kfd_holders(root: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the kernel's id of a GPU → the processes with memory on it."""
    found: dict[str, tuple[str, ...]] = {}
    for file in sorted((root / _KFD_PROCESSES).glob("[0-9]*/vram_*")):
        taken = text_of(file).strip()
        if taken.isdigit() and int(taken):
            pid, gpu = file.parent.name, file.name.removeprefix("vram_")
            name = text_of(root / "proc" / pid / "comm").strip() or "?"
            found[gpu] = (*found.get(gpu, ()), f"pid {pid} ({name}), {int(taken) >> 20} MiB")
    return found


def _kfd_id(gpu: KfdGpu, root: Path) -> str:
    return text_of(root / _KFD_NODES / str(gpu.node) / "gpu_id").strip()


def _opens(root: Path, path: str) -> bool:
    return os.access(root / path.lstrip("/"), os.R_OK | os.W_OK)


def _numa_node(device: Path) -> int:
    text = text_of(device / "numa_node").strip()
    return int(text) if text.isdigit() else -1
