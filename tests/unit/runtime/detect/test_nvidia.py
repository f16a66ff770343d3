"""nvidia-smi: what it prints, and what becomes of it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.runtime.detect.nvidia import FIELDS, find_nvidia, parse_gpus
from tests.unit.runtime.detect.conftest import Machine, about, recorded

HOST_MIB = 122_880


class TestParser:
    def test_eight_equal_gpus(self) -> None:
        gpus = [one.gpu for one in parse_gpus(recorded("nvidia/h100x8.csv"))]
        assert [gpu.index for gpu in gpus] == list(range(8))
        assert {(g.vendor, g.name, g.memory_mib, g.arch, g.render_node) for g in gpus} == {
            ("cuda", "NVIDIA H100 80GB HBM3", 81559, "9.0", "")
        }
        assert len({gpu.uuid for gpu in gpus}) == 8

    def test_one_that_the_proof_saw(self) -> None:
        (one,) = parse_gpus(recorded("nvidia/nvidia-h200.csv"))
        assert (one.gpu.name, one.gpu.memory_mib, one.gpu.arch) == ("NVIDIA H200", 143771, "9.0")

    def test_mig_mode_is_read(self) -> None:
        gpus = parse_gpus(recorded("nvidia/a100x4_mig.csv"))
        assert [one.mig for one in gpus] == [False, True, False, False]

    @pytest.mark.parametrize("name", ["gb10", "gb10_not_supported"])
    def test_a_gpu_without_its_own_memory(self, name: str) -> None:
        (one,) = parse_gpus(recorded(f"nvidia/{name}.csv"))
        assert (one.gpu.name, one.gpu.memory_mib, one.gpu.arch) == ("NVIDIA GB10", 0, "12.1")

    def test_a_name_may_hold_commas(self) -> None:
        (one,) = parse_gpus(recorded("nvidia/name_with_commas.csv"))
        assert one.gpu.name == "Quadro RTX 8000, passive, 48 GB"
        assert (one.gpu.memory_mib, one.gpu.arch) == (46080, "7.5")

    def test_fewer_fields_of_an_old_driver_are_read(self) -> None:
        gpus = parse_gpus(recorded("nvidia/old_driver_v100x2.csv"), FIELDS[:4])
        assert [(g.gpu.memory_mib, g.gpu.arch, g.mig) for g in gpus] == [(32510, "", False)] * 2

    def test_the_order_is_that_of_the_indices(self) -> None:
        lines = recorded("nvidia/h100x8.csv").splitlines()
        assert [one.gpu.index for one in parse_gpus("\n".join(reversed(lines)))] == list(range(8))

    @pytest.mark.parametrize(
        "text", ["", "\n\n", "\x00\x01", "0, GPU-1", "a,b,c,d,e,f", "0, x, name, 1, 9.0, Disabled"]
    )
    def test_other_text_holds_no_gpu(self, text: str) -> None:
        assert parse_gpus(text) == ()


class TestOutcomes:
    def test_a_missing_nvidia_smi_is_reported(self, machine: Machine) -> None:
        found = find_nvidia(machine.tools, HOST_MIB)
        assert (found.gpus, found.seen) == ((), ("nvidia-smi: not installed",))
        assert not found.unusable

    @pytest.mark.parametrize(
        ("maker", "kind", "counts"),
        [
            ("0x10de", "0x030200", True),
            ("0x10de", "0x030000", True),
            ("0x10de", "0x040300", False),  # the sound of a graphics card
            ("0x8086", "0x030000", False),
        ],
    )
    def test_gpus_without_a_driver_are_seen_on_the_bus(
        self, machine: Machine, maker: str, kind: str, counts: bool
    ) -> None:
        machine.has_on_bus(maker, kind, count=2)
        found = find_nvidia(machine.tools, HOST_MIB)
        assert (found.gpus, found.unusable) == ((), counts)
        line = ("PCI bus: 2 NVIDIA GPUs, and no driver that works",) if counts else ()
        assert found.seen == ("nvidia-smi: not installed", *line)

    def test_gpus_are_found_by_nvidia_smi(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/rtx4090x2.csv"))
        found = find_nvidia(machine.tools, HOST_MIB)
        assert len(found.gpus) == 2
        assert found.seen == ("nvidia-smi: 2 \xd7 NVIDIA GeForce RTX 4090, 24564 MiB",)
        assert machine.calls("nvidia-smi") == [
            "--query-gpu=index,uuid,name,memory.total,compute_cap,mig.mode.current"
            " --format=csv,noheader,nounits"
        ]

    @pytest.mark.parametrize(
        ("text", "code", "says"),
        [
            ("no_driver", 9, "failed with 9: NVIDIA-SMI has failed because it couldn't comm"),
            ("version_mismatch", 18, "failed with 18: Failed to initialize NVML: Driver/library"),
            ("no_devices", 6, "no devices were found"),
            ("no_devices", 0, "no devices were found"),
        ],
    )
    def test_a_failure_of_nvidia_smi_is_reported(
        self, machine: Machine, text: str, code: int, says: str
    ) -> None:
        machine.prints("nvidia-smi", recorded(f"nvidia/{text}.txt"), code=code)
        found = find_nvidia(machine.tools, HOST_MIB)
        assert (found.gpus, found.unusable) == ((), True)
        assert f"nvidia-smi: {says}" in about(found.seen, "nvidia-smi")
        assert machine.detect().unusable == ("cuda",)

    @pytest.mark.parametrize("text", ["\x07what?\n", ""])
    def test_invalid_output_of_nvidia_smi_is_reported(self, machine: Machine, text: str) -> None:
        machine.prints("nvidia-smi", text)
        assert "no GPU in its output" in about(find_nvidia(machine.tools, 1).seen, "nvidia-smi")

    def test_an_nvidia_smi_that_hangs_is_reported(self, machine: Machine) -> None:
        machine.install("nvidia-smi", "/bin/sleep 60")
        begin = time.monotonic()
        found = machine.detect(timeout_s=0.2)
        assert "nvidia-smi: no answer in 0.2 s" in found.seen
        assert time.monotonic() - begin < 30

    def test_an_nvidia_smi_that_hangs_is_ended_with_its_children(self, machine: Machine) -> None:
        pid_file = machine.root / "helper"
        machine.install("nvidia-smi", f'/bin/sleep 60 &\necho $! > "{pid_file}"\nwait')
        machine.detect(timeout_s=2)
        helper = Path(f"/proc/{int(pid_file.read_text())}/stat")
        deadline = time.monotonic() + 20  # by itself it would end after 60
        with suppress(FileNotFoundError, ProcessLookupError):
            while helper.read_text().split()[2] != "Z":
                assert time.monotonic() < deadline, "the helper still runs"
                time.sleep(0.01)

    def test_an_error_after_the_list_does_not_hide_the_gpus(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/h100x8.csv") + "WARNING: infoROM\n", code=14)
        assert len(find_nvidia(machine.tools, HOST_MIB).gpus) == 8

    def test_an_nvidia_smi_that_does_not_start_is_reported(self, machine: Machine) -> None:
        machine.install("nvidia-smi", "")
        (machine.root / "bin/nvidia-smi").write_bytes(b"\x7fELF no program")
        assert "does not start" in about(machine.detect().seen, "nvidia-smi")

    def test_warnings_before_the_answer(self, machine: Machine) -> None:
        text = "WARNING: infoROM is corrupted at gpu 0000:05:00.0\n"
        machine.prints("nvidia-smi", text + recorded("nvidia/h100x8.csv"))
        assert len(find_nvidia(machine.tools, HOST_MIB).gpus) == 8

    def test_an_old_driver_is_asked_for_less(self, machine: Machine) -> None:
        for name in ("no_compute_cap", "no_mig"):
            (machine.root / name).write_text(recorded(f"nvidia/{name}.txt"))
        (machine.root / "v100").write_text(recorded("nvidia/old_driver_v100x2.csv"))
        machine.install(
            "nvidia-smi",
            f'show() {{ while IFS= read -r l; do echo "$l"; done < "{machine.root}/$1"; }}\n'
            "case $1 in *compute_cap*) show no_compute_cap; exit 2;;\n"
            "*mig.mode*) show no_mig; exit 2;; *) show v100;; esac",
        )
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [(gpu.memory_mib, gpu.arch) for gpu in found.gpus] == [(32510, "")] * 2
        assert len(machine.calls("nvidia-smi")) == 3

    def test_a_driver_that_knows_no_field_is_not_asked_forever(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/no_mig.txt"), code=2)
        assert "failed with 2" in about(find_nvidia(machine.tools, 1).seen, "nvidia-smi")
        assert len(machine.calls("nvidia-smi")) <= 3


class TestWhatCanBeUsed:
    def test_a_gpu_in_mig_mode_is_left_out(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/a100x4_mig.csv"))
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [gpu.index for gpu in found.gpus] == [0, 2, 3]
        assert "GPU 1 is left out: MIG is enabled" in about(found.seen, "MIG")

    def test_a_gpu_without_memory_has_the_hosts(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/gb10.csv"))
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [gpu.memory_mib for gpu in found.gpus] == [HOST_MIB]
        assert "shares the host's" in about(found.seen, "GPU 0")

    def test_two_of_these_have_half_each(self, machine: Machine) -> None:
        line = recorded("nvidia/gb10.csv")
        machine.prints("nvidia-smi", line + line.replace("0, GPU-", "1, GPU-f", 1))
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [gpu.memory_mib for gpu in found.gpus] == [HOST_MIB // 2] * 2

    def test_a_lost_gpu_is_left_out(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/one_gpu_lost.csv"))
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [gpu.index for gpu in found.gpus] == [0]
        assert "its memory reads '[Unknown Error]'" in about(found.seen, "GPU 1")


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("setting", "indices"),
        [
            ("0,3", [0, 3]),
            ("3,0", [0, 3]),
            (" 2 , 1 ", [1, 2]),
            ("", []),
            ("-1", []),
            ("NoDevFiles", []),
            ("0,2,-1,1", [0, 2]),
            ("1,8,2", [1]),
            ("all", []),
        ],
    )
    def test_visible_devices_are_chosen_by_index(
        self, machine: Machine, setting: str, indices: list[int]
    ) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/h100x8.csv"))
        machine.environ["CUDA_VISIBLE_DEVICES"] = setting
        found = find_nvidia(machine.tools, HOST_MIB)
        assert [gpu.index for gpu in found.gpus] == indices
        assert f"leaves {len(indices)} of 8 NVIDIA GPUs" in about(
            found.seen, "CUDA_VISIBLE_DEVICES"
        )
        assert found.unusable == (setting == "all"), "who hides them all wants CPUs"

    def test_uuids_and_their_beginnings(self, machine: Machine) -> None:
        text = recorded("nvidia/h100x8.csv")
        uuids = [one.gpu.uuid for one in parse_gpus(text)]
        machine.prints("nvidia-smi", text)
        machine.environ["CUDA_VISIBLE_DEVICES"] = f"{uuids[5]},{uuids[2][:12]}"
        assert [gpu.index for gpu in find_nvidia(machine.tools, 1).gpus] == [2, 5]
        # More than one begins like this, so it names none.
        machine.environ["CUDA_VISIBLE_DEVICES"] = "GPU-"
        assert find_nvidia(machine.tools, 1).gpus == ()

    def test_mig_instances_are_not_used(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/a100x4_mig.csv"))
        machine.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1c9bdb5a-3d4b-5c4e-9b3e-8d0b4d1ea8d5"
        found = find_nvidia(machine.tools, 1)
        assert (found.gpus, found.unusable) == ((), True)
        assert "MIG instances are not used" in about(found.seen, "CUDA_VISIBLE_DEVICES")

    def test_gpus_that_are_all_in_mig_mode(self, machine: Machine) -> None:
        text = recorded("nvidia/a100x4_mig.csv").replace("Disabled", "Enabled")
        machine.prints("nvidia-smi", text)
        found = find_nvidia(machine.tools, 1)
        assert (found.gpus, found.unusable) == ((), True)
        said = "\n".join(found.seen)
        assert "GPU 3 is left out: MIG is enabled (sudo nvidia-smi -i 3 -mig 0 ends it)" in said
        assert "available as a whole; engines do not run on MIG instances" in said

    def test_a_visible_gpu_in_mig_mode_is_left_out(self, machine: Machine) -> None:
        machine.prints("nvidia-smi", recorded("nvidia/a100x4_mig.csv"))
        machine.environ["CUDA_VISIBLE_DEVICES"] = "1,2"
        assert [gpu.index for gpu in find_nvidia(machine.tools, 1).gpus] == [2]
