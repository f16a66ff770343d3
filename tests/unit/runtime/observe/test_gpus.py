"""Drivers and what is taken of GPUs: by nvidia-smi, and by the kernel's files for AMD."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.amd import read_kfd
from deploy.runtime.observe import see_gpus
from tests.unit.runtime.detect.conftest import BUSES, Machine

GPUS = (
    "0, GPU-aaaa, 4521, 580.65.06, 00000000:3B:00.0\n"
    "1, GPU-bbbb, [N/A], 580.65.06, 00000000:AF:00.0\n"
)
HOLDERS = (
    "GPU-aaaa, 4021, /usr/bin/python3, 4096\n"
    "GPU-aaaa, 4022, a name, with commas, [N/A]\n"
    "[Insufficient Permissions], no, x, y\n"
)
PAGE = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06    CUDA Version: 13.0     |\n"
CUDA = (
    Gpu(0, "cuda", "H100", 81559, uuid="GPU-aaaa"),
    Gpu(1, "cuda", "H100", 81559, uuid="GPU-bbbb"),
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def nvidia_smi(machine: Machine, *, page: str = PAGE, code: int = 0) -> None:
    for name, text in (("gpu", GPUS), ("apps", HOLDERS), ("page", page)):
        (machine.root / name).write_text(text)
    show = 'while IFS= read -r line; do printf "%s\\n" "$line"; done <'
    machine.install(
        "nvidia-smi",
        f'case "$1" in --query-gpu*) {show} "{machine.root}/gpu";; '
        f'--query-compute*) {show} "{machine.root}/apps";; '
        f'*) {show} "{machine.root}/page";; esac\nexit {code}',
    )


def test_memory_use_and_numa_of_nvidia_gpus_are_read(machine: Machine) -> None:
    nvidia_smi(machine)
    for bus, node in (("0000:3b:00.0", "0"), ("0000:af:00.0", "1")):
        card = machine.root / "sys/bus/pci/devices" / bus
        card.mkdir(parents=True)
        (card / "numa_node").write_text(f"{node}\n")
    seen = see_gpus(CUDA, machine.tools, machine.root)
    assert (seen.driver, seen.cuda, seen.trouble) == ("580.65.06", "13.0", "")
    assert [(use.index, use.used_mib) for use in seen.uses] == [(0, 4521), (1, None)]
    assert seen.uses[0].holders == (
        "pid 4021 (python3), 4096 MiB",
        "pid 4022 (a name, with commas)",
    )
    assert seen.uses[1].holders == ()
    assert seen.nodes == {0: 0, 1: 1}


def test_the_word_of_newer_drivers(machine: Machine) -> None:
    nvidia_smi(machine, page="| KMD Version: 595.10   CUDA UMD Version: 13.2  |\n")
    assert see_gpus(CUDA, machine.tools, machine.root).cuda == "13.2"


def test_nvidia_smi_is_not_there(machine: Machine) -> None:
    seen = see_gpus(CUDA, machine.tools, machine.root)
    assert (seen.uses, seen.cuda, seen.trouble) == ((), "", "not installed")


def test_a_failure_of_nvidia_smi_is_reported(machine: Machine) -> None:
    machine.prints("nvidia-smi", "Failed to initialize NVML", code=18)
    seen = see_gpus(CUDA, machine.tools, machine.root)
    assert seen.uses == () and "Failed to initialize NVML" in seen.trouble


def test_no_tool_is_asked_without_gpus(machine: Machine) -> None:
    nvidia_smi(machine)
    see_gpus((), machine.tools, machine.root)
    assert machine.calls("nvidia-smi") == []


def amd(machine: Machine) -> tuple[Gpu, ...]:
    machine.kernel_lists(("mi300x", 196592), ("mi300x", 196592))
    assert len(BUSES) >= 2
    return tuple(
        Gpu(index, "rocm", "MI300X", 196592, render_node=found.render_node, arch="gfx942")
        for index, found in enumerate(read_kfd(machine.root))
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_use_and_numa_of_amd_gpus_are_read(machine: Machine) -> None:
    gpus = amd(machine)
    root = machine.root
    for at, gpu in enumerate(gpus):
        card = root / "sys/class/drm" / Path(gpu.render_node).name / "device"
        write(card / "mem_info_vram_used", f"{(at + 1) << 30}\n")
        write(card / "numa_node", f"{at}\n")
        write(root / f"sys/class/kfd/kfd/topology/nodes/{2 + at}/gpu_id", f"{51000 + at}\n")
    write(root / "sys/class/kfd/kfd/proc/77/vram_51001", f"{3 << 30}\n")
    write(root / "sys/class/kfd/kfd/proc/78/vram_51001", "0\n")
    write(root / "proc/77/comm", "python\n")
    write(root / "sys/module/amdgpu/version", "6.12.12\n")
    seen = see_gpus(gpus, machine.tools, root)
    assert seen.driver == "6.12.12"
    assert [(use.index, use.used_mib) for use in seen.uses] == [(0, 1024), (1, 2048)]
    assert [use.holders for use in seen.uses] == [(), ("pid 77 (python), 3072 MiB",)]
    assert (seen.closed, seen.nodes) == ((), {0: 0, 1: 1})
    assert machine.calls("amd-smi") == []


def test_amd_where_the_kernel_tells_little(machine: Machine) -> None:
    seen = see_gpus(amd(machine), machine.tools, machine.root)
    assert [use.used_mib for use in seen.uses] == [None, None]
    assert (seen.driver, seen.nodes) == ("", {})


def test_amd_nodes_that_this_user_may_not_open(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = amd(machine)
    closed = str(machine.root / gpus[1].render_node.lstrip("/"))
    real = os.access  # root may open everything
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and real(path, mode))
    assert see_gpus(gpus, machine.tools, machine.root).closed == (gpus[1].render_node,)
