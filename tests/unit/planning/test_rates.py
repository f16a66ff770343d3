"""What GPUs compute and the store carries, as plans estimate it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.config.kinds import Kind
from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.config.spec import StackSpec
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.notes import plan_notes
from deploy.planning.plan import make_plan
from deploy.planning.rates import computed_gb_s

LLAMA_8B = Model("/m", "llama-8b", "folder", ModelShape(32, 32, 8, 128, 131072), 16_060_522_496)
LLAMA_70B = Model("/m", "llama-70b", "folder", ModelShape(80, 64, 8, 128, 131072), 141_107_412_992)


def noted(
    model: Model, name: str = "NVIDIA H100 80GB HBM3", **fields: Any
) -> tuple[Any, list[str]]:
    gpus = tuple(Gpu(index, "cuda", name, 81559, uuid=f"GPU-{index}") for index in range(8))
    machine = Inventory(cpus=208, memory_mib=1 << 21, gpus=gpus)
    spec = StackSpec.model_validate({"vendor": "cuda", "runtime": "process", **fields})
    plan = make_plan(spec, model, machine)
    return plan, [line for line in plan_notes(plan, machine) if "estimate" in line]


def test_an_h100_and_an_8b_model_as_reported() -> None:
    plan, _ = noted(LLAMA_8B, gpus=2)
    assert computed_gb_s(plan) == pytest.approx(3.2, abs=0.1)  # 2.6 to 5.2 are


def test_the_rate_is_of_producers_only() -> None:
    two, four = (computed_gb_s(noted(LLAMA_70B, gpus=n, tp=2)[0]) for n in (4, 8))
    assert two is not None
    assert four == pytest.approx(2 * two)


def test_a_gpu_that_engines_share_counts_once() -> None:
    assert computed_gb_s(noted(LLAMA_8B, gpus=1)[0]) == computed_gb_s(noted(LLAMA_8B, gpus=2)[0])


def test_quantized_weights_are_as_many_as_others() -> None:
    """Of an FP8 model the file is half as large, and a token costs as much."""
    plain = computed_gb_s(noted(LLAMA_8B, gpus=2)[0])
    size = LLAMA_8B.weight_bytes
    assert size is not None
    for bits in (8, 4):
        small = replace(LLAMA_8B, weight_bytes=size * bits // 16, kind=Kind(weight_bits=bits))
        assert computed_gb_s(noted(small, gpus=2)[0]) == pytest.approx(plain)


def test_a_slow_store_is_noted_with_the_needed_shards() -> None:
    _, notes = noted(LLAMA_8B, gpus=2, redis={"shards": 2})
    assert notes == [
        "estimate: prefill computes up to 3.2 GB/s of KV, 2 Redis servers move 2.4; under full "
        "load, loading KV is slower than computing it (redis.shards: 3 would be enough)"
    ]
    _, notes = noted(LLAMA_8B, gpus=2)
    assert notes == ["estimate: prefill computes up to 3.2 GB/s of KV, 4 Redis servers move 4.8"]


def test_a_rate_that_no_number_of_shards_can_carry_is_noted() -> None:
    small = replace(LLAMA_8B, weight_bytes=1_500_000_000)
    _, (note,) = noted(small, gpus=8)
    assert "no redis.shards would be enough" in note


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (LLAMA_8B, "Some GPU of next year"),
        (replace(LLAMA_8B, weight_bytes=None), "NVIDIA H100 80GB HBM3"),
        (replace(LLAMA_8B, shape=None), "NVIDIA H100 80GB HBM3"),
    ],
)
def test_unknown_values_have_no_estimate(model: Model, name: str) -> None:
    assert noted(model, name, gpus=2)[1] == []


def test_a_user_supplied_redis_has_no_estimate() -> None:
    assert noted(LLAMA_8B, gpus=2, redis={"url_file": "/url"})[1] == []


def test_the_first_row_that_fits_is_taken() -> None:
    by_name = {
        name: computed_gb_s(noted(LLAMA_8B, name, gpus=2)[0])
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "nvidia a100-sxm4-80gb")
    }
    assert sorted(by_name, key=lambda name: by_name[name] or 0) == [
        "nvidia a100-sxm4-80gb", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known"),
    [("NVIDIA RTX A1000", False), ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA GB200", True)],
)
def test_a_name_that_only_contains_a_known_one_is_unknown(name: str, known: bool) -> None:
    plan, _ = noted(LLAMA_8B, name, gpus=2)
    assert (computed_gb_s(plan) is not None) == known
