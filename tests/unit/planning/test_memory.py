"""How much memory KV and the store get, on GPUs and in the host."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape, OtherLayers
from deploy.errors import ConfigError, NotEnoughMemory
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from tests.unit.stack.cases import machine_with

Make = Callable[..., Plan]

GIB = 2**30
SHAPE = ModelShape(layers=32, attention_heads=32, kv_heads=8, head_dim=128, max_positions=131072)
A_TOKEN = 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, size, bfloat16
BLOCK_BYTES = 16 * A_TOKEN
WIDE = replace(SHAPE, layers=4, kv_heads=32)  # 64 KiB a token
MODEL = Model("owner/8b", "8b", "hub", SHAPE, 15 * GIB)
HUGE = replace(MODEL, ref="owner/70b", served_name="70b", weight_bytes=140 * GIB)
UNKNOWN = Model("owner/new", "new", "hub", None)
GPU_MIB = 80 * 1024


def gpus(plan: Make, count: int = 2, *, model: Model = MODEL, **fields: Any) -> Plan:
    machine = fields.pop("machine", machine_with("cuda", *range(count), memory_mib=GPU_MIB))
    return plan(model=model, machine=machine, **{"vendor": "cuda", **fields})


def test_a_context_that_kv_space_limits_is_of_whole_blocks(plan: Make) -> None:
    """Of 4,681 tokens that fit, an engine takes 4,672, and does not start with more."""
    shape = ModelShape(28, 16, 8, 128, max_positions=40960)
    made = plan(model=replace(MODEL, shape=shape, weight_bytes=GIB), engine={"dtype": "bfloat16"})
    assert (GIB // 2 // (2 * 28 * 8 * 128 * 2), made.max_model_len) == (4681, 4672)


class TestWeights:
    def test_too_many_for_a_gpu(self, plan: Make) -> None:
        with pytest.raises(NotEnoughMemory) as caught:
            gpus(plan, 8, model=HUGE)
        assert "--model: 70b has 140.0 GiB of weights" in caught.value.message
        assert "72.0 GiB" in caught.value.message, "0.9 of 80"
        assert "--tp 4" in caught.value.hint, "35 GiB a rank"
        assert caught.value.exit_code == 3

    def test_a_shared_gpu_has_less_room(self, plan: Make) -> None:
        fitting = replace(MODEL, weight_bytes=40 * GIB)
        gpus(plan, model=fitting)
        with pytest.raises(NotEnoughMemory, match=r"36\.0 GiB"):
            gpus(plan, 1, model=fitting, gpus=1)

    def test_the_smallest_gpu_decides(self, plan: Make) -> None:
        big, small = (
            machine_with("cuda", 0, memory_mib=GPU_MIB),
            machine_with("cuda", 1, memory_mib=16 * 1024),
        )
        machine = replace(big, gpus=(*big.gpus, *small.gpus))
        with pytest.raises(NotEnoughMemory, match=r"14\.4 GiB"):
            gpus(plan, machine=machine)

    def test_unknown_weights_are_left_to_the_engine(self, plan: Make) -> None:
        made = gpus(plan, model=UNKNOWN)
        assert (made.kv_cache_bytes, made.max_model_len) == (None, None)
        assert made.gpu_share == 0.9

    def test_processors_are_not_asked(self, plan: Make) -> None:
        assert plan(model=HUGE).gpu_share is None


class TestSpace:
    def test_an_engine_takes_what_its_share_leaves(self, plan: Make) -> None:
        assert gpus(plan).kv_cache_bytes is None

    def test_a_given_kv_size_is_kept(self, plan: Make) -> None:
        assert gpus(plan, engine={"kv_cache_gib": 4}).kv_cache_bytes == 4 * GIB + BLOCK_BYTES

    def test_kv_space_includes_vllms_null_block(self, plan: Make) -> None:
        """Without it a KV space of exactly the context is refused by the engine, after a minute."""
        made = plan(model=replace(MODEL, shape=WIDE), engine={"max_model_len": 8192})
        a_token = 65536
        assert (made.kv_bytes_per_token, made.max_model_len) == (a_token, 8192)
        assert made.kv_cache_bytes == (8192 + made.block_size) * a_token

    def test_each_rank_has_its_part_of_the_null_block(self, plan: Make) -> None:
        made = gpus(plan, 4, topology="1p1d", tp=2, engine={"kv_cache_gib": 1})
        assert made.kv_cache_bytes == GIB + BLOCK_BYTES // 2

    def test_a_given_kv_size_limits_the_context(self, plan: Make) -> None:
        made = gpus(plan, engine={"kv_cache_gib": 4})
        assert made.max_model_len == 4 * GIB // A_TOKEN

    def test_a_context_beyond_the_room_is_refused(self, plan: Make) -> None:
        tight = replace(MODEL, weight_bytes=68 * GIB)  # leaves 1 GiB of 72
        length = gpus(plan, model=tight).max_model_len
        assert length == int(GIB // A_TOKEN * 0.9), "what an engine measures may be less"
        with pytest.raises(ConfigError) as caught:
            gpus(plan, model=tight, engine={"max_model_len": 32768})
        assert "engine.max_model_len: 32768" in caught.value.message
        assert str(GIB // A_TOKEN) in caught.value.message

    def test_more_than_fits_beside_the_weights_is_refused(self, plan: Make) -> None:
        with pytest.raises(NotEnoughMemory) as caught:
            gpus(plan, engine={"kv_cache_gib": 60})
        assert "engine.kv_cache_gib: 60 GiB" in caught.value.message
        suggested = re.search(r"kv_cache_gib to ([\d.]+)", caught.value.hint)
        assert suggested is not None
        made = gpus(plan, engine={"kv_cache_gib": float(suggested[1])})
        assert made.kv_cache_bytes == 54 * GIB + BLOCK_BYTES, (
            "72 less 15 of weights and 3 of its own"
        )

    def test_engines_that_share_a_gpu_get_a_kv_size(self, plan: Make) -> None:
        """Each by a number of its own, for one that measured would count the other's memory."""
        made = gpus(plan, 1, gpus=1)
        assert made.kv_cache_bytes is not None
        assert made.kv_cache_bytes == pytest.approx(0.9 * (36 - 15 - 3) * GIB + BLOCK_BYTES)
        weights_and_own = 2 * (15 + 3) * GIB
        assert 2 * made.kv_cache_bytes + weights_and_own < 72 * GIB
        named = gpus(plan, 1, gpus=1, engine={"kv_cache_gib": 2})
        assert named.kv_cache_bytes == 2 * GIB + BLOCK_BYTES

    def test_ranks_hold_parts_of_the_kv_heads(self, plan: Make) -> None:
        one = gpus(plan, 4, topology="1p1d", engine={"kv_cache_gib": 1})
        two = gpus(plan, 4, topology="1p1d", tp=2, engine={"kv_cache_gib": 1})
        assert (one.max_model_len, two.max_model_len) == (GIB // A_TOKEN, 2 * GIB // A_TOKEN)

    def test_ranks_beyond_the_kv_heads_hold_copies(self, plan: Make) -> None:
        few = replace(MODEL, shape=replace(SHAPE, kv_heads=2))
        a_token = A_TOKEN // 4
        made = gpus(plan, 8, model=few, topology="1p1d", tp=4, engine={"kv_cache_gib": 0.5})
        assert made.max_model_len == 2 * (GIB // 2) // a_token

    def test_the_context_is_at_most_the_models(self, plan: Make) -> None:
        assert gpus(plan).max_model_len == SHAPE.max_positions


class TestStore:
    """Redis's maxmemory: twice the producers' KV, within a quarter of the host, 1 GiB at least."""

    def test_a_given_size_of_redis_is_kept(self, plan: Make) -> None:
        assert gpus(plan, redis={"memory_gib": 3.5}).redis_memory_mib == 3584

    def test_a_small_size_of_redis_is_kept(self, plan: Make) -> None:
        assert plan(redis={"memory_gib": 0.0001}).redis_memory_mib == 1

    def test_redis_has_a_minimum_size(self, plan: Make) -> None:
        small = plan(engine={"kv_cache_gib": 0.01}, machine=Inventory(2, 2048))
        assert small.redis_memory_mib == 1024

    def test_redis_holds_twice_the_kv_of_all_producers(self, plan: Make) -> None:
        machine = Inventory(cpus=8, memory_mib=1 << 20)
        one = plan(engine={"kv_cache_gib": 4}, machine=machine)
        two = plan(engine={"kv_cache_gib": 4}, machine=machine, topology="2p1d")
        assert (one.redis_memory_mib, two.redis_memory_mib) == (8192, 16384)
        more_consumers = plan(engine={"kv_cache_gib": 4}, machine=machine, topology="1p3d")
        assert more_consumers.redis_memory_mib == 8192, "they store nothing"

    def test_redis_takes_at_most_a_quarter_of_the_host(self, plan: Make) -> None:
        machine = Inventory(cpus=8, memory_mib=16384)
        assert plan(engine={"kv_cache_gib": 4}, machine=machine).redis_memory_mib == 4096

    def test_the_size_of_redis_follows_from_free_gpu_memory(self, plan: Make) -> None:
        made = gpus(plan)
        room = (72 - 15 - 3) * GIB // A_TOKEN * A_TOKEN
        assert made.redis_memory_mib == pytest.approx(2 * room / 2**20, abs=1)

    def test_unknown_weights_count_by_contexts(self, plan: Make) -> None:
        made = gpus(plan, model=replace(MODEL, weight_bytes=None), engine={"max_model_len": 2048})
        assert made.redis_memory_mib == 2 * 16 * 2048 * A_TOKEN // 2**20

    def test_redis_takes_a_quarter_of_the_host_for_an_unknown_model(self, plan: Make) -> None:
        """The floor would hold a few thousand tokens of a large one."""
        made = gpus(plan, model=UNKNOWN)
        assert made.redis_memory_mib == (1 << 20) // 4
        assert made.store_tokens is None
        small = plan(model=UNKNOWN, machine=Inventory(2, 2048))
        assert small.redis_memory_mib == 1024, "and still the floor"
        assert gpus(plan, model=UNKNOWN, redis={"memory_gib": 2}).redis_memory_mib == 2048

    def test_the_capacity_of_redis_is_known_in_tokens(self, plan: Make) -> None:
        """A value of 32 MiB and its header takes 40 MiB of Redis's allocator, so 25 are held."""
        assert gpus(plan, redis={"memory_gib": 1}).store_tokens == 25 * 256
        halves = gpus(plan, 4, topology="1p1d", tp=2, redis={"memory_gib": 1})
        assert halves.store_tokens == 25 * 256, "two values of 20 MiB"


class TestHost:
    def test_gpu_engines_hold_no_kv_in_it(self, plan: Make) -> None:
        made = gpus(plan, engine={"kv_cache_gib": 40})
        expected = made.vendor.engine_base_mib + 1024 * made.limits.staging_gib
        assert {engine.memory_mib for engine in made.engines} == {expected}

    def test_each_rank_has_its_own_staging(self, plan: Make) -> None:
        staging = {"staging_gib": 2}
        one, two = (gpus(plan, 4, topology="1p1d", tp=tp, lmcache=staging) for tp in (1, 2))
        assert two.engines[0].memory_mib == 2 * one.engines[0].memory_mib

    def test_block_is_the_vendors_unless_named(self, plan: Make) -> None:
        assert (gpus(plan).block_size, plan().block_size) == (16, 32)
        assert gpus(plan, engine={"block_size": 64}).block_size == 64


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--gpu-memory-utilization", "engine.gpu_memory"),
        ("--gpu-memory-utilization=0.5", "engine.gpu_memory"),
        ("--gpu_memory_utilization=0.5", "engine.gpu_memory"),
        ("--kv-cache-memory-bytes", "engine.kv_cache_gib"),
        ("--tensor-parallel-size=2", "--tp"),
        ("-tp", "--tp"),
        ("--block-size", "engine.block_size"),
        ("--max-model-len", "engine.max_model_len"),
        ("--model", "--model"),
        ("--port", "--port"),
    ],
)
def test_arguments_that_the_plan_sets_are_refused(plan: Make, argument: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpus(plan, engine={"args": [argument]})
    option = argument.partition("=")[0].replace("_", "-")
    assert f"engine.args: '{option}'" in caught.value.message
    assert caught.value.hint == f"use {instead} instead"


def test_other_layers_divide_among_ranks_by_their_own_heads() -> None:
    """As in Gemma 4, whose layers of full attention have fewer KV heads than its windows."""
    shape = ModelShape(25, 16, 8, 256, 262144, others=(OtherLayers(5, 2, 2 * 512),))
    windows, full = 25 * 8 * 2 * 256 * 2, 5 * 2 * 2 * 512 * 2
    assert shape.kv_bytes_per_token(2) == windows + full == 225_280
    assert shape.rank_kv_bytes_per_token(2, 4) == windows // 4 + full // 2
    assert shape.all_layers == 30


def test_an_indexers_numbers_have_a_size_of_their_own() -> None:
    shape = ModelShape(61, 128, 128, 576, 163840, 576, (OtherLayers(61, 1, 132, item_bytes=1),))
    assert shape.kv_bytes_per_token(2) == 61 * (2 * 576 + 132)
    assert shape.kv_bytes_per_token(4) == 61 * (4 * 576 + 132)
    assert shape.rank_kv_bytes_per_token(2, 8) == shape.kv_bytes_per_token(2)
    assert shape.all_layers == 61
