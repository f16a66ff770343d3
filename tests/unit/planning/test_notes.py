"""What a plan says beside its numbers, and what makes a stack smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.planning.inventory import Inventory
from deploy.planning.notes import plan_notes, smaller
from deploy.planning.plan import Plan

Make = Callable[..., Plan]
SMALL = Inventory(cpus=4, memory_mib=23 * 1024)
UNKNOWN = Model("owner/new", "owner/new", "hub", None)


def notes(plan: Make, machine: Inventory = SMALL, **fields: Any) -> tuple[str, ...]:
    model = fields.pop("model", None)
    made = plan(machine=machine, **({"model": model} if model else {}), **fields)
    return plan_notes(made, machine)


class TestNotes:
    def test_a_good_plan_has_no_notes(self, plan: Make) -> None:
        assert notes(plan) == ()

    def test_a_data_type_for_a_slow_processor(self, plan: Make) -> None:
        (note,) = notes(plan, replace(SMALL, fast_bfloat16=False))
        assert "float32" in note and "AVX-512" in note and "engine.dtype" in note
        asked = {"engine": {"dtype": "float32"}}
        assert notes(plan, replace(SMALL, fast_bfloat16=False), **asked) == ()

    def test_assumed_gpus_are_noted(self, plan: Make) -> None:
        machine = replace(SMALL, seen=("nvidia-smi: not installed", "assumed: 1 GPU of 80 GiB"))
        assert notes(plan, machine) == ("assumed: 1 GPU of 80 GiB",)

    def test_a_model_that_is_not_cached_is_noted(self, plan: Make) -> None:
        (note,) = notes(plan, model=UNKNOWN)
        assert note.startswith("config.json of owner/new is not in the hub's cache here")
        assert "KV size and context are unknown" in note
        assert "a quarter of the machine's memory" in note
        assert "hf download owner/new config.json" in note
        assert "redis.memory_gib" in note

    def test_a_size_of_redis_that_is_named_is_kept(self, plan: Make) -> None:
        (note,) = notes(plan, model=UNKNOWN, redis={"memory_gib": 2})
        assert "unknown" in note
        assert "edis" not in note

    def test_a_model_whose_config_says_too_little(self, plan: Make) -> None:
        (note,) = notes(plan, model=replace(UNKNOWN, source="folder"))
        assert "does not tell pdkit how much KV its layers keep" in note
        assert "download" not in note

    def test_a_store_that_holds_no_long_prompt(self, plan: Make) -> None:
        (note,) = notes(plan, redis={"memory_gib": 0.03})
        assert note.startswith("Redis holds 12,544 tokens of KV, and a prompt may have 32,768")
        assert "redis.memory_gib" in note
        assert notes(plan, redis={"memory_gib": 0.09}) == ()

    def test_a_plan_larger_than_the_machine_is_noted(self, plan: Make) -> None:
        (note,) = notes(plan, redis={"memory_gib": 22})
        assert note.startswith(
            "27.1 GiB expected, the machine has 23.0 GiB: deploy up would refuse"
        )
        assert "redis.memory_gib" in note


class TestSmaller:
    """The setting that is the cause comes first, and no other where it is enough."""

    @pytest.mark.parametrize(
        ("fields", "over_mib", "words", "others"),
        [
            ({"redis": {"memory_gib": 22}}, 5000, "redis.memory_gib (it is 22.0)", "topology"),
            ({"engine": {"kv_cache_gib": 9}}, 5000, "engine.kv_cache_gib (it is 9)", "redis"),
            ({"topology": "3p5d"}, 5000, "fewer engines than 8, by --topology 1p1d", "redis"),
            ({"lmcache": {"staging_gib": 9}}, 5000, "lmcache.staging_gib (it is 9)", "topology"),
        ],
    )
    def test_the_setting_that_needs_most_memory_is_named(
        self, plan: Make, fields: dict[str, Any], over_mib: int, words: str, others: str
    ) -> None:
        said = smaller(plan(machine=Inventory(8, 1024), **fields), over_mib)
        assert words in said
        assert others not in said
        assert " and " not in said

    def test_several_settings_are_named_if_one_is_not_enough(self, plan: Make) -> None:
        made = plan(topology="2p2d", redis={"memory_gib": 9})
        said = smaller(made, 13 * 1024)
        assert said.startswith("a smaller redis.memory_gib")
        assert said.endswith("--topology 1p1d")

    def test_the_smallest_stack_cannot_be_made_smaller(self, plan: Make) -> None:
        said = smaller(plan(machine=Inventory(8, 1024)), 100)
        assert "topology" not in said
        assert "memory" in said


class TestAContainersLimit:
    def said(self, plan: Make, runtime: str, limit: float) -> str:
        planned = plan(runtime=runtime, engine={"memory_gib": limit})
        return "; ".join(plan_notes(planned, Inventory(16, 65536)))

    def test_less_than_the_plan_expects_is_reported_with_both_numbers(self, plan: Make) -> None:
        said = self.said(plan, "compose", 2)
        assert "expected to hold 2.6 GiB, and is killed above 2" in said

    def test_a_limit_of_the_expected_size_is_not_noted(self, plan: Make) -> None:
        assert "memory_gib" not in self.said(plan, "compose", 3)

    def test_processes_have_no_limit(self, plan: Make) -> None:
        assert "memory_gib" not in self.said(plan, "process", 2)
