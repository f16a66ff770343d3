"""Which GPUs engines get, of those that are there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError, MissingGpus
from deploy.planning.gpus import allot, gpu_memory, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from tests.unit.conftest import MACHINE
from tests.unit.stack.cases import machine_with

Make = Callable[..., Plan]

MODEL = Model("owner/m", "m", "hub", ModelShape(28, 16, 8, 128, 40960), 2**30)
BOTH = replace(
    machine_with("cuda", 0, 1),
    gpus=(*machine_with("cuda", 0, 1).gpus, *machine_with("rocm", 0).gpus),
)


def gpu_plan(plan: Make, machine: Inventory, **fields: Any) -> Plan:
    vendor = machine.gpus[0].vendor if machine.gpus else "cuda"
    return plan(model=MODEL, machine=machine, **{"vendor": vendor, **fields})


def given(plan: Plan) -> list[tuple[int, ...]]:
    return [engine.devices for engine in plan.engines]


class TestOneForEach:
    @pytest.mark.parametrize("vendor", ["cuda", "rocm"])
    @pytest.mark.parametrize(
        ("fields", "engines", "ranks"),
        [
            ({"topology": "1p1d"}, 2, 1),
            ({"topology": "1p3d"}, 4, 1),
            ({"topology": "2p2d"}, 4, 1),
            ({"gpus": 8}, 8, 1),
            ({"topology": "4p4d"}, 8, 1),
            ({"topology": "2p1d", "tp": 2}, 3, 2),
            ({"gpus": 6, "tp": 2, "topology": "2p1d"}, 3, 2),
            ({"gpus": 8, "tp": 4}, 2, 4),
            ({"topology": "1p1d", "tp": 4}, 2, 4),
        ],
    )
    def test_no_gpu_is_given_twice(
        self, plan: Make, vendor: Any, fields: dict[str, Any], engines: int, ranks: int
    ) -> None:
        made = gpu_plan(plan, machine_with(vendor, *range(8)), **fields)
        assert [len(own) for own in given(made)] == [ranks] * engines
        assert set(Counter(sum(given(made), ())).values()) == {1}
        assert not made.shares_gpus
        assert made.gpu_share == 0.9

    def test_eight_gpus_are_4p4d(self, plan: Make) -> None:
        made = gpu_plan(plan, machine_with("cuda", *range(8)), gpus=8)
        assert str(made.topology) == "4p4d"
        assert given(made) == [(index,) for index in range(8)]

    def test_ranks_of_an_engine_are_neighbours(self, plan: Make) -> None:
        made = gpu_plan(plan, machine_with("rocm", *range(6)), gpus=6, tp=2)
        assert given(made) == [(0, 1), (2, 3), (4, 5)]
        assert str(made.topology) == "1p2d"

    @pytest.mark.parametrize(
        ("indices", "expected"), [((1, 3), [(1,), (3,)]), ((6, 2, 5), [(2,), (5,)])]
    )
    def test_indices_with_holes_in_their_order(
        self, plan: Make, indices: tuple[int, ...], expected: list[tuple[int, ...]]
    ) -> None:
        made = gpu_plan(plan, machine_with("cuda", *indices), topology="1p1d")
        assert given(made) == expected

    def test_cpu_engines_need_no_gpu(self, plan: Make) -> None:
        made = plan(gpus=8)
        assert given(made) == [()] * 8
        assert made.gpu_share is None


class TestShared:
    @pytest.mark.parametrize(
        ("topology", "share"), [(None, 0.45), ("1p1d", 0.45), ("1p2d", 0.3), ("2p3d", 0.18)]
    )
    def test_any_topology_on_one_with_its_memory_divided(
        self, plan: Make, topology: str | None, share: float
    ) -> None:
        made = gpu_plan(plan, machine_with("cuda", 3), gpus=1, topology=topology)
        assert set(given(made)) == {(3,)}
        assert made.shares_gpus
        assert made.gpu_share == share

    def test_a_machine_with_one_shares_it_unasked(self, plan: Make) -> None:
        made = gpu_plan(plan, machine_with("rocm", 0))
        assert (str(made.topology), given(made)) == ("1p1d", [(0,), (0,)])

    def test_a_machine_with_two_does_not(self, plan: Make) -> None:
        assert given(gpu_plan(plan, machine_with("rocm", 0, 1))) == [(0,), (1,)]

    def test_one_gpu_is_shared_if_one_is_asked_for(self, plan: Make) -> None:
        assert given(gpu_plan(plan, machine_with("cuda", 0, 1, 2), gpus=1)) == [(0,), (0,)]

    def test_a_named_topology_has_its_own_gpus(self, plan: Make) -> None:
        with pytest.raises(MissingGpus, match="2 GPUs needed for --vendor cuda, 1 found"):
            gpu_plan(plan, machine_with("cuda", 0), topology="1p1d")

    def test_together_never_more_than_asked(self) -> None:
        machine = machine_with("cuda", 0)
        for engines in range(2, 65):
            memory = gpu_memory([machine.gpus] * engines, 0.9)
            assert memory is not None and memory.shared
            assert 0.9 - engines / 1000 < memory.share * engines <= 0.9 + 1e-9

    @pytest.mark.parametrize("share", [0.9, 0.8765, 0.12345])
    def test_a_single_engine_gets_no_kv_size(self, plan: Make, share: float) -> None:
        """Also where its share is rounded: only sharers cannot measure what there is."""
        alone = gpu_plan(plan, machine_with("cuda", 0, 1), gpus=2, engine={"gpu_memory": share})
        assert alone.kv_cache_bytes is None

    def test_a_smaller_share_where_it_is_asked_for(self, plan: Make) -> None:
        made = gpu_plan(plan, machine_with("cuda", 0), gpus=1, engine={"gpu_memory": 0.6})
        assert made.gpu_share == 0.3

    @pytest.mark.parametrize("fields", [{"gpus": 1, "tp": 2}, {"tp": 2}])
    def test_ranks_of_one_engine_cannot(self, plan: Make, fields: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            gpu_plan(plan, machine_with("cuda", 0), **fields)
        assert "--tp: 2 ranks" in caught.value.message or "--tp 2" in caught.value.message
        assert re.match(r"deploy plan( --gpus 1)?( --tp 1)? \(fits", caught.value.hint)
        assert "--gpus 4" not in caught.value.hint, "they are not there"


class TestTooFew:
    def test_the_error_says_which_gpus_were_found(self, plan: Make) -> None:
        seen = ("nvidia-smi: 2 of H100",)
        machine = replace(machine_with("cuda", 0, 1), seen=seen)
        with pytest.raises(MissingGpus) as caught:
            gpu_plan(plan, machine, gpus=4)
        assert "4 GPUs needed for --vendor cuda, 2 found" in caught.value.message
        assert caught.value.details == seen
        assert "--gpus 2" in caught.value.hint
        assert caught.value.exit_code == 3

    @pytest.mark.parametrize(
        ("there", "fields"),
        [
            (8, {"topology": "2p2d", "tp": 4}),
            (3, {"topology": "1p3d"}),
            (6, {"gpus": 8, "tp": 4}),
            (1, {"topology": "1p1d", "tp": 2}),
            (5, {"producers": 3, "consumers": 3}),
            (7, {"gpus": 16, "tp": 2}),
        ],
    )
    def test_the_suggested_topology_fits(
        self, plan: Make, there: int, fields: dict[str, Any]
    ) -> None:
        machine = machine_with("cuda", *range(there))
        with pytest.raises(MissingGpus) as caught:
            gpu_plan(plan, machine, **fields)
        (changes,) = caught.value.retry
        changed = {option.removeprefix("--"): value for option, value in changes.items()}
        merged = {**fields, **changed}
        gpu_plan(plan, machine, **{name: value for name, value in merged.items() if value})

    def test_a_machine_without_gpus_is_refused(self, plan: Make) -> None:
        with pytest.raises(MissingGpus, match="none found") as caught:
            gpu_plan(plan, MACHINE, gpus=1)
        assert "1 GPU needed for" in caught.value.message
        assert "--vendor cpu" in caught.value.hint

    def test_gpus_of_another_vendor_do_not_count(self, plan: Make) -> None:
        assert given(gpu_plan(plan, BOTH, vendor="cuda", topology="1p1d")) == [(0,), (1,)]
        with pytest.raises(MissingGpus, match="2 GPUs needed for --vendor rocm, 1 found"):
            gpu_plan(plan, BOTH, vendor="rocm", topology="1p1d")

    @pytest.mark.parametrize(
        ("gpus", "tp", "better"),
        [(3, 2, 4), (5, 2, 4), (7, 2, 8), (2, 2, 4), (6, 4, 8), (9, 4, 8), (1, 2, 4)],
    )
    def test_left_over_ones_are_refused_with_the_nearest_number(
        self, plan: Make, gpus: int, tp: int, better: int
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            plan(vendor="cuda", gpus=gpus, tp=tp, machine=machine_with("cuda", *range(16)))
        assert f"--gpus: {gpus} " in caught.value.message
        assert f"--tp {tp}" in caught.value.message
        suggested = re.search(r"--gpus (\d+)", caught.value.hint)
        assert suggested is not None
        assert int(suggested[1]) == better
        assert better % tp == 0

    def test_a_topology_that_needs_another_number(self, plan: Make) -> None:
        with pytest.raises(ConfigError) as caught:
            gpu_plan(plan, machine_with("cuda", *range(8)), gpus=4, tp=2, topology="1p3d")
        assert "--gpus 4 contradicts --topology 1p3d" in caught.value.message
        assert "4 GPUs of 2" in caught.value.message


class TestAssumed:
    @pytest.mark.parametrize("vendor", ["cuda", "rocm"])
    def test_missing_gpus_are_assumed_equal(self, vendor: str) -> None:
        made = with_assumed_gpus(MACHINE, VENDORS[vendor], 4)
        gpus = made.gpus_of(vendor)
        assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
        assert {gpu.memory_mib for gpu in gpus} == {80 * 1024}
        nodes = {gpu.render_node for gpu in gpus}
        assert len(nodes) == (4 if vendor == "rocm" else 1)
        assert bool(made.gpu_groups) is (vendor == "rocm")
        assert "assumed: 4 GPUs of 80 GiB" in made.seen

    def test_enough_real_gpus_are_kept(self) -> None:
        machine = machine_with("rocm", 0, 1, 2)
        assert with_assumed_gpus(machine, VENDORS["rocm"], 2) is machine

    def test_groups_of_the_machine_are_kept(self) -> None:
        machine = machine_with("rocm", 0)
        assert with_assumed_gpus(machine, VENDORS["rocm"], 2).gpu_groups == machine.gpu_groups

    def test_no_gpu_is_assumed_for_cpus(self) -> None:
        assert with_assumed_gpus(MACHINE, VENDORS["cpu"], 8) is MACHINE


def test_allotting_is_by_rank() -> None:
    machine = machine_with("cuda", 0, 1, 2, 3)
    found = allot(machine, VENDORS["cuda"], engines=2, ranks=2, needed=4)
    assert [[gpu.index for gpu in own] for own in found] == [[0, 1], [2, 3]]
