"""AMD GPUs: the kernel's list, and what amd-smi and rocm-smi add to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.runtime.detect import amd
from deploy.runtime.detect.amd import (
    Card,
    KfdGpu,
    device_groups,
    find_amd,
    gfx_target,
    json_in,
    matching,
    own_bytes,
    parse_amd_smi,
    parse_properties,
    parse_rocm_smi,
    read_kfd,
)
from tests.unit.runtime.detect.conftest import Machine, about, recorded

MI300X = ("mi300x", 196592)


class TestKernelsList:
    @pytest.mark.parametrize(
        ("version", "target"),
        [
            (90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (90008, "gfx908"),
            (100300, "gfx1030"), (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201"),
            (0, ""),
        ],
    )  # fmt: skip
    def test_gpu_targets_are_read_from_their_version(self, version: int, target: str) -> None:
        assert gfx_target(version) == target

    def test_properties_are_parsed(self) -> None:
        values = parse_properties(recorded("kfd/mi300x.properties"))
        assert (values["simd_count"], values["gfx_target_version"]) == (1216, 90402)
        assert values["hive_id"] == 11638818706288400384

    def test_other_text_holds_no_property(self) -> None:
        assert parse_properties("a b c\nsimd_count x\n\nname\nsize -1\n\x00\nok 1") == {"ok": 1}

    def test_memory_of_the_host_does_not_count(self) -> None:
        banks = ["heap_type 0\nsize_in_bytes 64", "heap_type 1\nsize_in_bytes 7"]
        assert own_bytes([*banks, "heap_type 2\nsize_in_bytes 1", "", "heap_type 1"]) == 8

    def test_processors_are_not_gpus(self, machine: Machine) -> None:
        machine.kernel_lists(*[MI300X] * 8)
        gpus = read_kfd(machine.root)
        assert [gpu.node for gpu in gpus] == list(range(2, 10))
        assert [gpu.render_node for gpu in gpus] == [f"/dev/dri/renderD{128 + n}" for n in range(8)]
        assert {(gpu.arch, gpu.memory_mib) for gpu in gpus} == {("gfx942", 196592)}
        assert (gpus[0].pci, gpus[7].pci) == ("0000:05:00.0", "0000:e5:00.0")
        assert gpus[1].uuid == "GPU-a5d3000000000001"

    def test_the_order_is_that_of_numbers_not_of_text(self, machine: Machine) -> None:
        machine.kernel_lists(*[MI300X] * 3, processors=9)
        assert [gpu.node for gpu in read_kfd(machine.root)] == [9, 10, 11]

    def test_gpus_hidden_from_a_container_are_not_listed(self, machine: Machine) -> None:
        machine.kernel_lists(*[MI300X] * 4)
        (machine.root / "dev/dri/renderD129").unlink()
        # The kernel refuses to show a GPU to a container that may not open it.
        properties = machine.root / "sys/class/kfd/kfd/topology/nodes/4/properties"
        properties.unlink()
        properties.mkdir()
        found = find_amd(machine.tools, machine.root)
        nodes = [gpu.render_node for gpu in found.gpus]
        assert nodes == ["/dev/dri/renderD128", "/dev/dri/renderD131"]
        assert [gpu.index for gpu in found.gpus] == [0, 1]

    def test_no_gpus_are_found_without_a_driver(self, machine: Machine) -> None:
        assert read_kfd(machine.root) == ()
        assert find_amd(machine.tools, machine.root).seen == ("/dev/kfd does not exist",)

    def test_no_gpus_are_found_without_the_device(self, machine: Machine) -> None:
        machine.kernel_lists(MI300X)
        (machine.root / "dev/kfd").unlink()
        found = find_amd(machine.tools, machine.root)
        assert (found.gpus, found.seen) == ((), ("/dev/kfd does not exist",))

    def test_a_driver_without_gpus_asks_no_tool(self, machine: Machine) -> None:
        machine.kernel_lists()
        machine.prints("amd-smi", recorded("amd/mi300x_x8.amd-smi.json"))
        found = find_amd(machine.tools, machine.root)
        assert found.gpus == ()
        assert "no GPU that ROCm can use" in about(found.seen, "/dev/kfd")
        assert machine.calls("amd-smi") == []


class TestGroups:
    def test_those_of_the_device_files(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.kernel_lists(*[MI300X] * 2)
        owners = {"kfd": 109, "renderD128": 109, "renderD129": 44, "renderD130": 0}
        real = Path.stat

        def stat(path: Path, **kwargs: bool) -> os.stat_result:
            values = list(real(path, **kwargs))
            values[5] = owners.get(path.name, 7)
            return os.stat_result(values)

        monkeypatch.setattr(amd.Path, "stat", stat)
        nodes = [f"/dev/dri/renderD{minor}" for minor in (128, 129)]
        assert device_groups(nodes, machine.root) == (44, 109)
        owners.update(kfd=0, renderD128=0)
        assert device_groups(nodes, machine.root) == (44,)
        assert device_groups(nodes[:1], machine.root) == (0,)

    def test_groups_are_read_from_the_device_files(self, machine: Machine) -> None:
        machine.kernel_lists(MI300X)
        group = (machine.root / "dev/kfd").stat().st_gid
        assert find_amd(machine.tools, machine.root).groups == (group,)

    def test_there_are_no_groups_without_gpus(self, machine: Machine) -> None:
        assert device_groups([], machine.root) == ()


class TestAmdSmi:
    @pytest.mark.parametrize(
        ("file", "count", "name", "memory_mib"),
        [
            ("mi300x_x8", 8, "AMD Instinct MI300X", 196592),
            ("mi210_x4", 4, "AMD Instinct MI210", 65520),
            # Its market name is a generic one, and the board has the right one.
            ("mi355x_x8", 8, "AMD Instinct MI355X", 294896),
        ],
    )
    def test_each_format_of_amd_smi_is_read(
        self, file: str, count: int, name: str, memory_mib: int
    ) -> None:
        cards = parse_amd_smi(recorded(f"amd/{file}.amd-smi.json"))
        assert {(card.name, card.memory_mib) for card in cards} == {(name, memory_mib)}
        assert len({card.pci for card in cards}) == count

    @pytest.mark.parametrize(
        "size", ["24560", '"24560 MB"', '{"value": 24560, "unit": "MB"}', '"24560"']
    )
    def test_each_format_of_a_memory_size_is_read(self, size: str) -> None:
        (card,) = parse_amd_smi(f'[{{"gpu": 0, "vram": {{"size": {size}}}}}]')
        assert card.memory_mib == 24560

    @pytest.mark.parametrize(
        "size", ['"N/A"', "null", '{"value": "N/A", "unit": "MB"}', "[]", '""']
    )
    def test_an_unknown_memory_size_is_zero(self, size: str) -> None:
        (card,) = parse_amd_smi(f'[{{"gpu": 0, "vram": {{"size": {size}}}}}]')
        assert (card.memory_mib, card.name) == (0, "")

    @pytest.mark.parametrize(
        "text", ["", "garbage", "[", "[1, null]", "{}", '{"gpu_data": 3}', '"gpu"', "null", "[{}]"]
    )
    def test_other_text_holds_no_card(self, text: str) -> None:
        assert parse_amd_smi(text) == ()
        assert parse_rocm_smi(text) == ()

    def test_an_answer_that_was_cut_off_holds_no_card(self) -> None:
        whole = recorded("amd/mi300x_x8.amd-smi.json")
        for end in (10, len(whole) // 2, len(whole) - 3):
            assert parse_amd_smi(whole[:end]) == ()

    def test_a_piece_of_an_answer_is_not_taken_for_the_whole(self) -> None:
        whole = recorded("amd/mi300x_x8.amd-smi.json")
        assert json_in(whole[: len(whole) // 2]) is None

    def test_warnings_may_stand_before_it(self) -> None:
        warning = "[WARNING] user is not in the groups render, video\nReturn {code} 3\n"
        assert len(parse_amd_smi(warning + recorded("amd/mi355x_x8.amd-smi.json"))) == 8
        assert json_in(warning + '{"a": 1}\nmore') == {"a": 1}


class TestRocmSmi:
    def test_the_format_of_rocm_6(self) -> None:
        cards = parse_rocm_smi(recorded("amd/mi300x_x8.rocm-smi.json"))
        assert [card.node for card in cards] == list(range(2, 10))
        assert cards[0].pci == "0000:05:00.0"
        assert {(c.name, c.memory_mib) for c in cards} == {("AMD Instinct MI300X", 196592)}

    def test_the_format_of_rocm_5(self) -> None:
        cards = parse_rocm_smi(recorded("amd/mi210_x4.rocm5-smi.json"))
        assert {(c.name, c.memory_mib, c.node) for c in cards} == {
            ("AMD INSTINCT MI210", 65520, None)
        }
        assert len(cards) == 4

    def test_an_answer_that_was_cut_off_holds_no_card(self) -> None:
        whole = recorded("amd/mi300x_x8.rocm-smi.json")
        assert parse_rocm_smi(whole[: len(whole) // 2]) == ()

    def test_cards_are_in_the_order_of_their_numbers(self) -> None:
        cards = ", ".join(f'"card{n}": {{"Card Series": "GPU {n}"}}' for n in (10, 2, 0))
        assert [c.name for c in parse_rocm_smi(f"{{{cards}}}")] == ["GPU 0", "GPU 2", "GPU 10"]


class TestMatching:
    GPU = KfdGpu(3, "gfx942", 1, "/dev/dri/renderD128", "0000:05:00.0", "")

    def test_the_kernels_number_comes_first_then_the_address(self) -> None:
        by_node = Card("by node", 1, pci="0000:46:00.0", node=3)
        exact = Card("exact", 1, pci="0000:05:00.0")
        partition = Card("partition", 1, pci="0000:05:00.1")
        cards = [partition, exact, by_node]
        assert matching(self.GPU, 0, cards, 3) == by_node
        assert matching(self.GPU, 0, cards[:2], 3) == exact
        assert matching(self.GPU, 0, cards[:1], 3) == partition

    def test_a_card_with_another_address_does_not_match(self) -> None:
        assert matching(self.GPU, 0, [Card("other", 1, pci="0000:46:00.0")], 1) is None

    def test_cards_without_addresses_match_only_if_all_are_listed(self) -> None:
        assert matching(self.GPU, 0, [Card("a", 1)], 1) == Card("a", 1)
        assert matching(self.GPU, 0, [Card("a", 1)], 2) is None


class TestMachines:
    def test_an_mi300x_machine_is_detected(self, machine: Machine) -> None:
        machine.kernel_lists(*[MI300X] * 8)
        machine.prints("amd-smi", recorded("amd/mi300x_x8.amd-smi.json"))
        found = find_amd(machine.tools, machine.root)
        assert [gpu.index for gpu in found.gpus] == list(range(8))
        assert found.gpus[7].render_node == "/dev/dri/renderD135"
        assert {(g.vendor, g.name, g.memory_mib, g.arch, g.uuid) for g in found.gpus} == {
            ("rocm", "AMD Instinct MI300X", 196592, "gfx942", "")
        }
        assert "/dev/kfd: 8 \xd7 gfx942, 196592 MiB" in found.seen
        assert "amd-smi: 8 \xd7 AMD Instinct MI300X, 196592 MiB" in found.seen

    def test_mi355x_without_any_tool(self, machine: Machine) -> None:
        machine.kernel_lists(*[("mi355x", 294896)] * 2)
        found = find_amd(machine.tools, machine.root)
        assert [(g.name, g.memory_mib) for g in found.gpus] == [("AMD gfx950", 294896)] * 2
        assert found.seen[1:3] == ("amd-smi: not installed", "rocm-smi: not installed")

    def test_a_server_gpu_names_itself(self, machine: Machine) -> None:
        machine.kernel_lists(("mi210", 65520))
        card = machine.root / "sys/class/drm/renderD128/device"
        card.mkdir(parents=True)
        (card / "product_name").write_text("AMD INSTINCT MI210\n")
        assert find_amd(machine.tools, machine.root).gpus[0].name == "AMD INSTINCT MI210"

    @pytest.mark.parametrize(
        "answer",
        [("", 1), ("ERROR: no driver\n", 255), ("[]\n", 0), ("{'gpu_data': []}", 0)],
    )
    def test_rocm_smi_is_asked_where_amd_smi_fails(
        self, machine: Machine, answer: tuple[str, int]
    ) -> None:
        machine.kernel_lists(*[MI300X] * 8)
        machine.prints("amd-smi", answer[0], code=answer[1])
        machine.prints("rocm-smi", recorded("amd/mi300x_x8.rocm-smi.json"))
        found = find_amd(machine.tools, machine.root)
        assert {gpu.name for gpu in found.gpus} == {"AMD Instinct MI300X"}
        assert about(found.seen, "amd-smi")
        assert "rocm-smi: 8 \xd7 AMD Instinct MI300X, 196592 MiB" in found.seen

    def test_a_whole_answer_counts_though_the_tool_then_fails(self, machine: Machine) -> None:
        machine.kernel_lists(*[MI300X] * 8)
        text = recorded("amd/mi300x_x8.amd-smi.json")
        machine.prints("amd-smi", text, code=1, errors="AMDSMI_STATUS_NOT_SUPPORTED\n")
        assert {gpu.name for gpu in find_amd(machine.tools, machine.root).gpus} == {
            "AMD Instinct MI300X"
        }

    def test_a_tool_that_hangs_costs_its_time_and_no_more(self, machine: Machine) -> None:
        machine.kernel_lists(MI300X)
        machine.install("amd-smi", "/bin/sleep 60")
        found = machine.detect(timeout_s=0.2)
        assert len(found.gpus) == 1
        assert "amd-smi: no answer in 0.2 s" in found.seen

    def test_cards_without_addresses_are_in_the_kernels_order(self, machine: Machine) -> None:
        machine.kernel_lists(*[("mi210", 65520)] * 4)
        machine.prints("rocm-smi", recorded("amd/mi210_x4.rocm5-smi.json"))
        names = [gpu.name for gpu in find_amd(machine.tools, machine.root).gpus]
        assert names == ["AMD INSTINCT MI210"] * 4

    def test_a_tools_order_may_be_another(self, machine: Machine) -> None:
        machine.kernel_lists(MI300X, ("mi210", 65520))
        cards = [
            '{"gpu": 0, "bus": {"bdf": "0000:26:00.0"}, "asic": {"market_name": "MI210"}}',
            '{"gpu": 1, "bus": {"bdf": "0000:05:00.0"}, "asic": {"market_name": "MI300X"}}',
        ]
        machine.prints("amd-smi", f"[{', '.join(cards)}]")
        gpus = find_amd(machine.tools, machine.root).gpus
        assert [(gpu.name, gpu.arch) for gpu in gpus] == [("MI300X", "gfx942"), ("MI210", "gfx90a")]

    def test_memory_that_the_kernel_does_not_name_is_the_tools(self, machine: Machine) -> None:
        machine.kernel_lists(("mi300x", 0))
        machine.prints("amd-smi", recorded("amd/mi300x_x8.amd-smi.json"))
        assert find_amd(machine.tools, machine.root).gpus[0].memory_mib == 196592

    def test_a_gpu_of_unknown_memory_is_left_out(self, machine: Machine) -> None:
        machine.kernel_lists(("mi300x", 0))
        found = find_amd(machine.tools, machine.root)
        assert (found.gpus, found.groups) == ((), ())
        assert "its memory is unknown" in about(found.seen, "left out")

    def test_partitions_are_gpus_with_their_part_of_the_memory(self, machine: Machine) -> None:
        machine.kernel_lists_partitions(8, 24574)
        machine.prints("amd-smi", recorded("amd/mi300x_cpx.amd-smi.json"))
        found = find_amd(machine.tools, machine.root)
        assert {(gpu.name, gpu.memory_mib) for gpu in found.gpus} == {
            ("AMD Instinct MI300X", 24574)
        }
        assert len({gpu.render_node for gpu in found.gpus}) == 8
        assert "8 partitions of 1 GPU" in about(found.seen, "partitions")


class TestProcessorsOwnGraphics:
    @pytest.mark.parametrize("order", [[0, 1], [1, 0]])
    def test_an_integrated_gpu_is_left_out_beside_a_larger_one(
        self, machine: Machine, order: list[int]
    ) -> None:
        kinds = [("rx7900xtx", 24560), ("igpu", 512)]
        machine.kernel_lists(*[kinds[at] for at in order])
        found = find_amd(machine.tools, machine.root)
        assert [(gpu.index, gpu.arch) for gpu in found.gpus] == [(order.index(0), "gfx1100")]
        assert "it has only 512 MiB" in about(found.seen, "left out")

    def test_a_discrete_gpu_keeps_its_name_beside_an_integrated_one(self, machine: Machine) -> None:
        machine.kernel_lists(("rx7900xtx", 24560))
        text = recorded("amd/rx7900xtx_igpu.amd-smi.json").replace("0000:03", "0000:05")
        machine.prints("amd-smi", text)
        assert find_amd(machine.tools, machine.root).gpus[0].name == "Radeon RX 7900 XTX"

    def test_an_integrated_gpu_is_used_if_it_is_the_only_one(self, machine: Machine) -> None:
        machine.kernel_lists(("igpu", 512))
        gpus = find_amd(machine.tools, machine.root).gpus
        assert [(gpu.name, gpu.memory_mib) for gpu in gpus] == [("AMD gfx1036", 512)]


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("settings", "indices"),
        [
            ({"HIP_VISIBLE_DEVICES": "1,3"}, [1, 3]),
            ({"ROCR_VISIBLE_DEVICES": "2,3"}, [2, 3]),
            ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
            ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
            ({"ROCR_VISIBLE_DEVICES": "GPU-a5d3000000000002"}, [2]),
            ({"ROCR_VISIBLE_DEVICES": "GPU-A5D3000000000001,0"}, [0, 1]),
            ({"ROCR_VISIBLE_DEVICES": ""}, []),
            ({"HIP_VISIBLE_DEVICES": "-1"}, []),
            ({"CUDA_VISIBLE_DEVICES": "0"}, [0]),
            ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "2"}, [2]),
        ],
    )
    def test_only_visible_devices_are_listed(
        self, machine: Machine, settings: dict[str, str], indices: list[int]
    ) -> None:
        machine.kernel_lists(*[MI300X] * 4)
        machine.environ.update(settings)
        found = find_amd(machine.tools, machine.root)
        assert [gpu.index for gpu in found.gpus] == indices
        assert "VISIBLE_DEVICES" in found.seen[-1]
