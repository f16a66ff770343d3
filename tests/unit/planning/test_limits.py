"""What KV takes on its way through Redis follows from the plan: no number is the same for all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config.model import Model, resolve_model
from deploy.config.shape import ModelShape
from deploy.errors import ConfigError
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from deploy.workflows.prepare import Prepared
from tests.unit.stack.cases import machine_with

Make = Callable[..., Plan]

GIB = 2**30
HEADER = 128
SLOWEST = 250e6  # bytes a second, of all engines together
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
# 64 KiB of KV a token in bfloat16.
WIDE = Model("/models/wide", "wide", "folder", ModelShape(1, 64, 64, 256, 32768))


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").touch()
    return path


def planned(plan: Make, tmp_path: Path, config: dict[str, Any], **fields: Any) -> Plan:
    folder = folder_with(tmp_path / "model", config)
    model = resolve_model(str(folder), tiny_path=Path("/tiny"), tiny_config={})
    machine = fields.pop("machine", machine_with("cuda", *range(8)))
    return plan(model=model, machine=machine, **{"vendor": "cuda", "gpus": 8, "tp": 2, **fields})


class TestSizes:
    def test_kv_bytes_of_grouped_heads(self, plan: Make, tmp_path: Path) -> None:
        made = planned(plan, tmp_path, LLAMA_70B)
        assert made.kv_bytes_per_token == 327_680
        assert made.limits.value_bytes == 256 * 327_680 // 2 + HEADER, "a rank has half the heads"
        assert made.storing_ranks == 8

    def test_kv_bytes_of_latent_attention(self, plan: Make, tmp_path: Path) -> None:
        """One plane for all heads, which every rank has whole and one of them stores."""
        made = planned(plan, tmp_path, DEEPSEEK_V2_LITE)
        assert made.kv_bytes_per_token == 31_104
        assert made.limits.value_bytes == 256 * 31_104 + HEADER
        assert made.storing_ranks == 4

    def test_kv_bytes_of_a_latent_model_that_vllm_runs_with_heads(
        self, plan: Make, tmp_path: Path
    ) -> None:
        made = planned(plan, tmp_path, {**DEEPSEEK_V2_LITE, "model_type": "minicpm3"})
        assert made.kv_bytes_per_token == 2 * 27 * 16 * (128 + 64) * 2

    def test_latent_attention_splits_by_its_heads_alone(self, plan: Make, tmp_path: Path) -> None:
        odd = {**DEEPSEEK_V2_LITE, "num_key_value_heads": 3}
        assert planned(plan, tmp_path, odd).tp == 2

    def test_ranks_of_latent_attention_add_no_kv_space(self, plan: Make, tmp_path: Path) -> None:
        engine = {"kv_cache_gib": 1, "block_size": 64}
        made = planned(plan, tmp_path, DEEPSEEK_V2_LITE, engine=engine)
        assert made.max_model_len == GIB // 31_104 // 64 * 64

    def test_a_layerwise_value_is_one_layer(self, plan: Make, tmp_path: Path) -> None:
        made = planned(plan, tmp_path, LLAMA_70B, layerwise=True)
        assert made.limits.value_bytes == 256 * 327_680 // 2 // 80 + HEADER


class TestStaging:
    def test_staging_memory_holds_the_longest_prompt(self, plan: Make) -> None:
        made = plan(model=WIDE, engine={"kv_cache_gib": 2, "max_model_len": 16384})
        assert made.limits.staging_gib == 1

    def test_staging_memory_is_at_most_four_steps(self, plan: Make, tmp_path: Path) -> None:
        made = planned(plan, tmp_path, LLAMA_70B)
        assert made.max_model_len == 131072
        assert made.limits.staging_gib == 4 * 8192 * 163_840 / GIB == 5

    @pytest.mark.parametrize(
        "args", [["--max-num-batched-tokens", "2k"], ["--max_num_batched_tokens=2000"]]
    )
    def test_staging_memory_follows_the_batched_tokens(
        self, plan: Make, tmp_path: Path, args: list[str]
    ) -> None:
        made = planned(plan, tmp_path, LLAMA_70B, engine={"args": args})
        assert made.limits.staging_gib == 1.25 >= 4 * 2000 * 163_840 / GIB

    def test_large_gpus_compute_larger_steps(self, plan: Make, tmp_path: Path) -> None:
        machine = machine_with("cuda", *range(8))
        large = replace(machine, gpus=tuple(replace(g, memory_mib=183_359) for g in machine.gpus))
        made = planned(plan, tmp_path, LLAMA_70B, machine=replace(large, memory_mib=2**21))
        assert made.limits.staging_gib == 10

    def test_layerwise_staging_memory_is_a_prompt_and_a_step(self, plan: Make) -> None:
        """The next step's store begins beside the load."""
        asked: dict[str, Any] = {"model": WIDE, "layerwise": True, "machine": Inventory(2, 2048)}
        engine = {"kv_cache_gib": 2, "max_model_len": 16384}
        short = ["--max-num-batched-tokens", "4096"]
        assert plan(**asked, engine=engine).limits.staging_gib == 1.5
        assert plan(**asked, engine={**engine, "args": short}).limits.staging_gib == 1.25

    @pytest.mark.parametrize("size", ["many", "0", "-1", "1.5K", ""])
    def test_an_invalid_step_size_is_refused(self, plan: Make, size: str) -> None:
        with pytest.raises(ConfigError) as caught:
            plan(model=WIDE, engine={"args": [f"--max-num-batched-tokens={size}"]})
        assert f"engine.args: --max-num-batched-tokens '{size}' is" in caught.value.message
        assert "--max-num-batched-tokens 8192" in caught.value.hint

    def test_staging_memory_of_all_ranks_is_at_most_a_quarter_of_the_machine(
        self, plan: Make, tmp_path: Path
    ) -> None:
        machine = replace(machine_with("cuda", *range(8)), memory_mib=64 * 1024)
        made = planned(plan, tmp_path, LLAMA_70B, machine=machine)
        assert made.limits.staging_gib * made.storing_ranks == 16

    def test_a_given_size_of_staging_memory_is_kept(self, plan: Make) -> None:
        assert plan(model=WIDE, lmcache={"staging_gib": 1.5}).limits.staging_gib == 1.5

    def test_staging_memory_without_room_for_two_chunks_is_refused(self, plan: Make) -> None:
        with pytest.raises(ConfigError) as caught:
            plan(model=WIDE, lmcache={"staging_gib": 0.02})
        assert "lmcache.staging_gib: 0.02 GiB" in caught.value.message
        assert "two chunks of 256 tokens" in caught.value.message
        suggested = float(re.findall(r"staging_gib to ([\d.]+)", caught.value.hint)[0])
        plan(model=WIDE, lmcache={"staging_gib": suggested})

    def test_layer_by_layer_a_prompt_must_fit_whole(self, plan: Make) -> None:
        """A plain load crosses in pieces; a layerwise one holds all layers of all chunks."""
        asked: dict[str, Any] = {"model": WIDE, "lmcache": {"staging_gib": 1}}
        asked["engine"] = {"kv_cache_gib": 2}
        plan(**asked)
        with pytest.raises(ConfigError) as caught:
            plan(layerwise=True, **asked)
        assert "lmcache.staging_gib: 1 GiB" in caught.value.message
        assert "32768 tokens" in caught.value.message
        assert "leave layerwise out" in caught.value.hint
        suggested = float(re.findall(r"staging_gib to ([\d.]+)", caught.value.hint)[0])
        plan(layerwise=True, **{**asked, "lmcache": {"staging_gib": suggested}})
        left_out = plan(layerwise=True, **{**asked, "lmcache": {}}, machine=Inventory(2, 2048))
        assert left_out.limits.staging_gib == suggested, "however little memory there is"

    def test_staging_memory_of_an_unknown_model_is_limited(self, plan: Make) -> None:
        unknown = Model("owner/new", "new", "hub", None)
        made = plan(model=unknown, vendor="cuda", machine=machine_with("cuda", 0, 1))
        assert made.limits.staging_gib == 5
        assert made.limits.value_bytes is None


class TestValues:
    def test_larger_than_redis_takes_are_refused(self, plan: Make) -> None:
        """Llama-8B has 131,072 bytes a token: 4,096 of them are 512 MiB, and then the header."""
        eight = Model("a/8b", "8b", "hub", ModelShape(32, 32, 8, 128, 131072), 15 * GIB)
        asked: dict[str, Any] = {
            "model": eight, "vendor": "cuda", "machine": machine_with("cuda", 0, 1),
        }  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            plan(**asked, lmcache={"chunk_size": 4096})
        assert "lmcache.chunk_size: a chunk of 4096 tokens" in caught.value.message
        assert "536,871,040 bytes" in caught.value.message
        assert "536,870,912" in caught.value.message
        assert caught.value.hint == "set lmcache.chunk_size to 2048"
        plan(**asked, lmcache={"chunk_size": 2048})
        plan(**asked, lmcache={"chunk_size": 4096}, layerwise=True)


class TestDeadlines:
    def test_deadlines_follow_from_bytes_ranks_and_engines(
        self, plan: Make, tmp_path: Path
    ) -> None:
        limits = planned(plan, tmp_path, LLAMA_70B).limits
        staged = 8 * 5 * GIB / SLOWEST
        assert limits.load_s == limits.store_s == pytest.approx(10 + staged, abs=0.1)
        assert limits.silent_s == pytest.approx(5 + 8 * 256 * 163_840 / SLOWEST, abs=0.1)
        lookup = 0.5 + 8 * 8 * 2**20 / SLOWEST + 4 * 131072 / 256 * 20e-6
        assert limits.lookup_s == pytest.approx(lookup, abs=0.1)

    @pytest.mark.parametrize(("vendor", "least", "most"), [("cpu", 2, 2.5), ("cuda", 0.5, 1)])
    def test_deadlines_of_a_small_stack_are_short(
        self, plan: Make, vendor: str, least: float, most: float
    ) -> None:
        """A lookup has longer where engines compute on the cores that it needs."""
        limits = plan(vendor=vendor, machine=machine_with(vendor, 0, 1)).limits
        assert least < limits.lookup_s < most
        assert limits.silent_s < 6 and limits.load_s < 12

    @pytest.mark.parametrize("change", [{"gpus": 4}, {"lmcache": {"staging_gib": 2}}])
    def test_less_to_move_takes_less_time(
        self, plan: Make, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        whole = planned(plan, tmp_path, LLAMA_70B)
        (tmp_path / "model").rename(tmp_path / "whole")
        less = planned(plan, tmp_path, LLAMA_70B, **change)
        assert less.limits.load_s < whole.limits.load_s

    def test_engines_get_the_deadlines(self, prepared: Callable[..., Prepared]) -> None:
        made = prepared()
        limits = made.plan.limits
        for service in made.stack.services:
            if service.role not in ("producer", "consumer"):
                continue
            said = yaml.safe_load(service.files[0].text)
            assert said["max_local_cpu_size"] == limits.staging_gib
            for name in ("lookup_s", "load_s", "store_s", "silent_s"):
                assert said["extra_config"][f"pdkit.{name}"] == getattr(limits, name)
            assert service.env["PDKIT_STORE_BARRIER_S"] == str(limits.store_s)
