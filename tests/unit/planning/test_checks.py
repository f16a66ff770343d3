"""Arguments and variables of engines that would change the plan without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.kinds import Kind
from deploy.config.model import Model
from deploy.config.shape import ModelShape, OtherLayers
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError
from deploy.planning.gpus import with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from deploy.workflows.prepare import Prepared
from tests.unit.conftest import MACHINE

Make = Callable[..., Plan]
SHAPE = ModelShape(layers=4, attention_heads=4, kv_heads=2, head_dim=64, max_positions=4096)
FP8 = ["--kv-cache-dtype", "fp8"]
GPUS = with_assumed_gpus(MACHINE, vendor_named("cuda"), 2)
SLOW = Inventory(4, 65536, fast_bfloat16=False)


def refusal(plan: Callable[..., Plan], **engine: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(engine=engine)
    return caught.value


class TestVariables:
    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("LMCACHE_CHUNK_SIZE", "lmcache.chunk_size"),
            ("LMCACHE_LOCAL_CPU", "leave it out"),
            ("LMCACHE_MAX_LOCAL_CPU_SIZE", "lmcache.staging_gib"),
            ("LMCACHE_REMOTE_URL", "redis.url_file"),
            ("LMCACHE_CONFIG_FILE", "leave it out"),
            ("lmcache_chunk_size", ""),
            ("CUDA_DEVICE_ORDER", "leave it out"),
            ("VLLM_API_KEY", "--api-key-file"),
            ("VLLM_PORT", "--port"),
            ("VLLM_DP_SIZE", "--topology"),
            ("VLLM_MODEL_REDIRECT_PATH", "--model"),
            ("PYTHONHASHSEED", "leave it out"),
            ("PROMETHEUS_MULTIPROC_DIR", "leave it out"),
            ("TMPDIR", "leave it out"),
            ("PDKIT_ENGINE_KEY_FILE", "engine.key_file"),
            ("PDKIT_STORE_BARRIER_S", "leave it out"),
        ],
    )
    def test_one_that_the_plan_decides_is_refused_by_name(
        self, plan: Callable[..., Plan], name: str, instead: str
    ) -> None:
        if not instead:  # programs tell capitals apart
            assert plan(engine={"env": {name: "2"}}).engines
            return
        error = refusal(plan, env={"A": "b", name: "2"})
        assert error.message.startswith(f"engine.env: {name} ")
        assert instead in error.hint

    @pytest.mark.parametrize(
        "name",
        ["PDKIT_DISABLE_FIXES", "LMCACHE_LOG_LEVEL", "VLLM_LOGGING_LEVEL", "HTTPS_PROXY", "HF_HOME",
         "VLLM_HOST_IP", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "VLLM_USE_V2_MODEL_RUNNER"],
    )  # fmt: skip
    def test_others_reach_the_engines(self, prepared: Callable[..., Prepared], name: str) -> None:
        stack = prepared(engine={"env": {name: "7"}}).stack
        assert "7" in stack.service("consumer-0").env[name].split(":")


@pytest.mark.parametrize(
    ("vendor", "hint"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES=0,1 deploy up, which plans with these GPUs only"),
        ("rocm", "HIP_VISIBLE_DEVICES=0,1 deploy up, which plans with these GPUs only"),
        ("cpu", "leave it out of "),
    ],
)
@pytest.mark.parametrize(
    "engine",
    [
        {"args": ["--device-ids", "2,3"]},
        {"env": {"CUDA_VISIBLE_DEVICES": "2"}},
        {"env": {"HIP_VISIBLE_DEVICES": "2"}},
        {"env": {"ROCR_VISIBLE_DEVICES": "2"}},
        {"env": {"NVIDIA_VISIBLE_DEVICES": "2"}},
    ],
)
def test_gpus_are_chosen_by_the_variable_of_the_vendor(
    prepared: Callable[..., Prepared], vendor: str, hint: str, engine: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="is set by the plan") as caught:
        prepared(vendor=vendor, machine=None, engine=engine)
    assert caught.value.hint.startswith(hint)


class TestArguments:
    @pytest.mark.parametrize(
        ("args", "option", "instead"),
        [
            (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size", "--tp"),
            (["--pipeline-parallel-size=2"], "--pipeline-parallel-size", "--tp"),
            (["--pipeline_parallel_size=2"], "--pipeline-parallel-size", "--tp"),
            (["--pipeline-parallel=2"], "--pipeline-parallel-size", "--tp"),
            (["--seed", "1", "-pp", "2"], "-pp", "--tp"),
            (["-pp=2"], "-pp", "--tp"),
            (["-pp2"], "-pp", "--tp"),
            (["--data-parallel-size", "2"], "--data-parallel-size", "--topology"),
            (["-dp", "2"], "-dp", "--topology"),
            (["--data_parallel_size_local=1"], "--data-parallel-size-local", "--topology"),
            (["-dpl", "1"], "-dpl", "--topology"),
            (["--data-parallel-external-lb"], "--data-parallel-external-lb", "--topology"),
            (["--no-data-parallel-hybrid-lb"], "--no-data-parallel-hybrid-lb", "--topology"),
            (["--data-parallel-of-tomorrow"], "--data-parallel-of-tomorrow", "--topology"),
            (["-dcp", "2"], "-dcp", "leave it out"),
            (["--prefill-context-parallel-size", "2"], "--prefill-context-parallel-size", "leave"),
            (["-pcp", "2"], "-pcp", "leave it out"),
            (["--nnodes", "2"], "--nnodes", "router.engines"),
            (["-n2"], "-n", "router.engines"),
            (["--headless"], "--headless", "router.engines"),
            (["--distributed-executor-backend", "ray"], "--distributed-executor-backend", "leave"),
            (["--tensor-par=2"], "--tensor-parallel-size", "--tp"),
            (["-tp", "2"], "-tp", "--tp"),
            (["--device-memory-utilization=0.5"], "--device-memory-utilization", "gpu_memory"),
            (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config", "--layerwise"),
            (["--kv-offloading-size", "4"], "--kv-offloading-size", "leave it out"),
            (["--config", "mine.yaml"], "--config", "engine.args"),
            (["--uds", "/tmp/x"], "--uds", "--port"),
            (["--ssl-keyfile=k"], "--ssl-keyfile", "leave"),
            (["--no-enable-prompt-tokens-details"], "--no-enable-prompt-tokens-details", "leave"),
        ],
    )  # fmt: skip
    def test_one_that_the_plan_decides_or_does_not_count_is_refused_by_name(
        self, plan: Callable[..., Plan], args: list[str], option: str, instead: str
    ) -> None:
        error = refusal(plan, args=args)
        assert error.message.startswith(f"engine.args: '{option}' ")
        assert instead in error.hint

    @pytest.mark.parametrize(
        "args",
        [
            ["--no-enable-prefix-caching"],
            # These begin as options of the plan do.
            ["--model-impl=vllm", "--tokenizer", "x", "--host-of-mine", "x"],
            ["--config-format", "auto"],
            ["--enable-expert-parallel"],
            ["-ep"],
            ["--model-impl", "vllm"],
            ["--max-num-seqs", "8"],
            ["-q", "fp8"],
            ["-O3"],
            ["-cc.mode=3"],
            ["--seed", "-1"],
            ["--hf-overrides", '{"pipeline_parallel_size": 2}'],
            ["--disable-custom-all-reduce", "--kv-cache-dtype", "fp8"],
        ],
    )
    def test_others_are_passed_on(self, plan: Callable[..., Plan], args: list[str]) -> None:
        assert plan(engine={"args": args}).engines


def test_weights_that_requests_replace_are_refused(plan: Callable[..., Plan]) -> None:
    """The old weights' KV would answer for the new."""
    engine = {"args": ["--weight-transfer-config", '{"backend": "nccl"}']}
    with pytest.raises(ConfigError) as caught:
        plan(topology="1p1d", engine=engine)
    assert "--weight-transfer-config" in caught.value.message
    assert "deploy swap" in caught.value.hint
    plan(topology="1a", engine=engine)


class TestScalesOfAnEnginesOwn:
    """Each engine would take its KV's scales from its own first batch, and misread others' KV."""

    @pytest.mark.parametrize(
        "argument",
        ["--calculate-kv-scales", "--calculate_kv_scales", "--calc", "--calculate-kv-s",
         "--calculate-kv-scales=true"],
    )  # fmt: skip
    @pytest.mark.parametrize("topology", ["1p1d", "2a+redis"])
    def test_they_are_refused_where_engines_share_kv(
        self, plan: Callable[..., Plan], argument: str, topology: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            plan(topology=topology, engine={"args": ["--kv-cache-dtype", "fp8", argument]})
        assert "first batch" in caught.value.message
        assert "--topology 1a" in caught.value.hint

    @pytest.mark.parametrize(
        "fields",
        [
            {"topology": "1a", "engine": {"args": ["--calculate-kv-scales"]}},
            {"topology": "1p1d", "engine": {"args": ["--no-calculate-kv-scales"]}},
            {"topology": "1p1d", "engine": {"args": ["--no_calculate_kv_scales"]}},
        ],
    )
    def test_they_are_allowed_where_nothing_can_be_misread(
        self, plan: Callable[..., Plan], fields: dict[str, Any]
    ) -> None:
        assert plan(**fields).engines


def of(**kind: Any) -> Model:
    return Model("/models/m", "m", "folder", SHAPE, kind=Kind(**kind))


# Layers of full attention have other heads than windows, as in Gemma 4.
TWO_SIZES = replace(of(), shape=replace(SHAPE, others=(OtherLayers(4, 2, 1024),)))


@pytest.mark.parametrize(
    ("fields", "words", "hint"),
    [
        ({"model": of(state="layer_types: mamba")}, "layer_types: mamba", "another kind"),
        ({"model": of(window=512)}, "sliding window (512 tokens)", "--disable-sliding-window"),
        ({"model": of(window=128)}, "sliding window (128 tokens)", "--topology 1a"),
        ({"model": of(mla=True)}, "m has MLA", "another kind"),
        ({"model": of(not_text="BertModel")}, "m is a BertModel", "generates text"),
        ({"model": of(groups="compress_ratios")}, "several groups", "another kind"),
        (
            {"model": replace(of(), shape=replace(SHAPE, groups=2))},
            "several groups",
            "another kind",
        ),
        (
            {"model": replace(of(), shape=replace(SHAPE, groups=0))},
            "several groups",
            "another kind",
        ),
        ({"model": TWO_SIZES}, "KV of several sizes, by layer", "--topology 1a"),
        ({"machine": SLOW, "engine": {"args": FP8}}, "fp8 needs AVX-512", "--kv-cache-dtype"),
        ({"machine": SLOW, "engine": {"args": ["--kv_cache_dtype=fp8_e4m3"]}}, "fp8", "leave"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    plan: Make, fields: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**fields)
    assert words in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"model": of()},
        {"model": of(mla=True), "vendor": "cuda", "gpus": 2, "machine": GPUS},
        {"model": of(window=512), "engine": {"args": ["--disable-sliding-window"]}},
        {"model": of(window=4096)},
        {"model": of(window=262144)},
        {"model": replace(of(), shape=replace(SHAPE, groups=1))},
        {"model": TWO_SIZES, "topology": "1a"},
        {"model": of(state="layer_types: mamba"), "topology": "1a"},
        {"model": of(groups="compress_ratios"), "topology": "2a"},
        {"model": of(window=256), "topology": "1a"},
        {"machine": MACHINE, "engine": {"args": FP8}},
        {"machine": SLOW, "engine": {"args": ["--kv-cache-dtype", "auto"]}},
    ],
)
def test_supported_models_are_planned(plan: Make, fields: dict[str, Any]) -> None:
    assert plan(**fields).engines


@pytest.mark.parametrize(
    ("connector", "reason"),
    [("lmcache", "has no place for states"), ("lmcache-mp", "--separate-object-groups")],
)
def test_states_are_refused_with_each_connectors_own_reason(
    plan: Make, connector: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match="layer_types: mamba") as caught:
        plan(model=of(state="layer_types: mamba"), connector=connector)
    assert reason in caught.value.message
