"""The whole machine, and the vendor that `auto` takes."""

from __future__ import annotations

import json
import os

import pytest

from deploy.planning.inventory import Gpu, GpuVendor, Inventory
from deploy.runtime.detect import detect_inventory, detected_vendor
from tests.unit.runtime.detect.conftest import Machine, about, recorded


def gpus(vendor: GpuVendor, count: int, memory_mib: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, vendor, "a GPU", memory_mib) for index in range(count))


def test_the_inventory_is_limited_to_this_process(machine: Machine) -> None:
    found = machine.detect()
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory_mib > 100
    assert (found.gpus, found.gpu_groups, found.container_gpus) == ((), (), ())
    assert found.seen == ("nvidia-smi: not installed", "/dev/kfd does not exist")


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("fpu avx2", False), ("fpu avx2 avx512f avx512bw", True), (None, True)],
)
def test_processors_without_avx512_are_slow_at_bfloat16(
    machine: Machine, flags: str | None, fast: bool
) -> None:
    if flags:
        (machine.root / "proc").mkdir()
        (machine.root / "proc" / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: {flags}\n")
    assert machine.detect().fast_bfloat16 is fast


def test_detection_works_on_this_machine() -> None:
    assert detect_inventory(timeout_s=10).seen


def test_gpu_access_of_docker_is_detected(machine: Machine) -> None:
    machine.prints("nvidia-smi", recorded("nvidia/h100x8.csv"))
    found = machine.detect(json.loads(recorded("docker/runtime.json")))
    assert found.container_gpus == ("nvidia",)
    assert len(found.gpus) == 8


def test_spec_files_count_where_the_daemon_reads_them(machine: Machine) -> None:
    (machine.root / "etc/cdi").mkdir(parents=True)
    (machine.root / "etc/cdi/nvidia.yaml").write_text(recorded("cdi/nvidia.yaml"))
    unlisted = machine.detect(json.loads(recorded("docker/cdi_unlisted.json")))
    assert unlisted.container_gpus == ("nvidia", "nvidia.com/gpu")
    assert machine.detect(json.loads(recorded("docker/plain.json"))).container_gpus == ()


def test_tools_in_folders_that_are_not_on_path(machine: Machine) -> None:
    machine.kernel_lists(("mi210", 65520))
    machine.prints("rocm-smi", recorded("amd/mi210_x4.rocm5-smi.json"))
    (machine.root / "opt/rocm").mkdir(parents=True)
    (machine.root / "bin").rename(machine.root / "opt/rocm/bin")
    assert "rocm-smi: 4 \xd7 AMD INSTINCT MI210, 65520 MiB" in machine.detect().seen


def test_gpus_of_both_vendors_are_detected(machine: Machine) -> None:
    machine.prints("nvidia-smi", recorded("nvidia/rtx4090x2.csv"))
    machine.kernel_lists(("igpu", 512))
    found = machine.detect()
    assert [gpu.vendor for gpu in found.gpus] == ["cuda", "cuda", "rocm"]
    assert detected_vendor(found) == "cuda"
    assert "'auto' takes cuda" in about(found.seen, "both vendors")


@pytest.mark.parametrize(
    ("there", "vendor"),
    [
        ((), "cpu"),
        (gpus("cuda", 1, 100), "cuda"),
        (gpus("rocm", 1, 100), "rocm"),
        (gpus("cuda", 1, 100) + gpus("rocm", 3, 50), "rocm"),
        (gpus("cuda", 4, 100) + gpus("rocm", 1, 300), "cuda"),
        (gpus("cuda", 1, 100) + gpus("rocm", 1, 100), "cuda"),
    ],
)
def test_the_vendor_is_the_one_with_more_memory(there: tuple[Gpu, ...], vendor: str) -> None:
    assert detected_vendor(Inventory(cpus=1, memory_mib=1, gpus=there)) == vendor
