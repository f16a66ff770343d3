"""One prompt in real engines on the CPU, by each of vLLM's model runners, as JSON on stdout.

Run as `python -m tests.gpu.second_runner MODEL` with Triton on PYTHONPATH. Each runner, 1 and 2, is
asked twice, with "none" to load and with "failing" loads, in a fork of its own. The second runner's
kernels run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from tests.gpu.forked import in_fork

# What forks would each import.
_SHARED = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_worker",
)
PROMPT = [(7 * i + 3) % 250 for i in range(96)]


def main(model: str) -> None:
    told = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    gc.disable()  # imports make no garbage
    _interpreter()
    for name in _SHARED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    answers = {
        f"{runner} {loads}": in_fork(
            lambda runner=runner, loads=loads: _answer(model, runner, loads)
        )
        for runner in ("1", "2")
        for loads in ("none", "failing")
    }
    with os.fdopen(told, "w") as stdout:
        json.dump(answers, stdout)


def _interpreter() -> None:
    """Let vLLM's CPU build take Triton: it asks for a CPU backend, which released wheels lack."""
    from triton import backends

    active = SimpleNamespace(is_active=lambda: True)
    backends.backends.clear()
    backends.backends["cpu"] = SimpleNamespace(driver=active, compiler=None)


def _answer(model: str, runner: str, loads: str) -> dict[str, Any]:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner) - 1)
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
