"""One prompt in a real engine on the CPU, by one of vLLM's model runners, as JSON on stdout.

Run as `python -m tests.gpu.second_runner MODEL RUNNER LOADS` with Triton on PYTHONPATH: RUNNER is 1
or 2, LOADS "none" or "failing". The second runner's kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

PROMPT = [(7 * i + 3) % 250 for i in range(96)]


def main(model: str, runner: str, loads: str) -> None:
    told = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner) - 1),
    }
    _interpreter()
    answer = _answer(model, loads)
    with os.fdopen(told, "w") as stdout:
        json.dump(answer, stdout)


def _interpreter() -> None:
    """Let vLLM's CPU build take Triton: it asks for a CPU backend, which released wheels lack."""
    from triton import backends

    active = SimpleNamespace(is_active=lambda: True)
    backends.backends.clear()
    backends.backends["cpu"] = SimpleNamespace(driver=active, compiler=None)


def _answer(model: str, loads: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    failing = KVTransferConfig(
        kv_connector="FailingLoads",
        kv_connector_module_path="tests.gpu.failing_loads",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=failing if loads == "failing" else None,
        max_model_len=1024,
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    (done,) = engine.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    config = engine.llm_engine.vllm_config
    return {
        "second_runner": config.use_v2_model_runner,
        "tokens": list(done.outputs[0].token_ids),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
