"""Arguments and variables of engines that would change the plan without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.planning.engine_settings import refused_option
from deploy.planning.plan import Plan
from deploy.workflows.prepare import Prepared


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
            ("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=0,1 deploy"),
            ("HIP_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES=0,1 deploy"),
            ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES=0,1 deploy"),
            ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES=0,1 deploy"),
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
            (["--device-ids", "2,3"], "--device-ids", "CUDA_VISIBLE_DEVICES=0,1 deploy"),
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

    def test_no_abbreviation_hides_an_option_that_is_allowed(self) -> None:
        """These are vLLM's options whose names begin as one of the plan's does."""
        for allowed in ("--model-impl", "--config-format", "--tokenizer", "--host-of-mine"):
            assert refused_option(allowed) is None
