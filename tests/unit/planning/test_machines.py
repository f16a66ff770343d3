"""Several machines alike, as one plan."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.config.spec import StackSpec, settle
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.machines import across, network_note
from deploy.planning.plan import Plan, make_plan
from deploy.planning.rates import computed_gb_s

LLAMA_8B = Model("/m", "llama-8b", "folder", ModelShape(32, 32, 8, 128, 131072), 16_060_522_496)


def planned(name: str = "NVIDIA H100 80GB HBM3", **fields: Any) -> Plan:
    gpus = tuple(Gpu(index, "cuda", name, 81559, uuid=f"GPU-{index}") for index in range(4))
    machine = Inventory(cpus=64, memory_mib=1 << 20, gpus=gpus)
    spec = settle(
        StackSpec(gpus=4, **fields), vendor="cuda", runtime="compose", connector="lmcache"
    )
    return make_plan(spec, LLAMA_8B, machine)


def test_engines_are_numbered_by_role() -> None:
    names = [engine.name for engine in across(planned(topology="1p3d"), 2).engines]
    assert names == [
        "producer-0", "producer-1", *(f"consumer-{number}" for number in range(6)),
    ]  # fmt: skip


def test_one_host_keeps_the_plan() -> None:
    plan = planned()
    assert across(plan, 1) is plan


@pytest.mark.parametrize(("machines", "shards"), [(2, 8), (4, 16), (5, 16)])
def test_each_machine_brings_its_redis_as_far_as_engines_know_so_many(
    machines: int, shards: int
) -> None:
    plan = planned()
    many = across(plan, machines)
    assert len(plan.redis) == 4
    assert [shard.name for shard in many.redis] == [f"redis-{number}" for number in range(shards)]


@pytest.mark.parametrize("machines", [2, 3, 4, 5, 6, 16, 64, 1000])
def test_redis_fits_the_memory_of_each_host(machines: int) -> None:
    plan = planned()
    many = across(plan, machines)
    on_a_machine = math.ceil(len(many.redis) / machines)
    largest = max(shard.memory_mib for shard in many.redis)
    assert largest * on_a_machine <= plan.redis_memory_mib
    # Nothing is left over where the machines share the servers equally.
    if len(many.redis) == machines * on_a_machine:
        assert many.redis_memory_mib == pytest.approx(machines * plan.redis_memory_mib, abs=16)


def test_a_redis_of_the_users_own_stays_one(tmp_path: Any) -> None:
    assert across(planned(redis={"url_file": tmp_path / "url"}), 3).redis == ()


def test_a_machine_sends_and_receives_twice_what_it_computes() -> None:
    plan = planned()
    computed = computed_gb_s(plan)
    assert computed is not None
    (note,) = network_note(plan, 2, None)
    assert f"up to {computed:.1f} GB/s of KV, for which it sends and receives" in note
    assert f"receives {16 * computed:.0f} Gbit/s" in note


@pytest.mark.parametrize("spare", [-1, 1])
def test_a_slow_link_is_a_warning(spare: int) -> None:
    plan = planned()
    link = round(16 * (computed_gb_s(plan) or 0)) + spare
    (note,) = network_note(plan, 2, link)
    assert ("loading KV is slower" in note) == (spare < 0)


def test_there_is_no_network_note_if_nothing_crosses() -> None:
    assert network_note(planned(), 1, 10) == []
    assert network_note(planned(topology="4a"), 2, 10) == []


def test_an_unknown_gpu_has_no_estimate() -> None:
    (note,) = network_note(planned("a GPU of tomorrow"), 2, 10)
    assert "is unknown" in note
