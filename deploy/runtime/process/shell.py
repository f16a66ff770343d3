"""What services inherit of the shell from which they are started as processes."""

from __future__ import annotations

from collections.abc import Iterable

# LMCache and vLLM prefer these to what the plan says.
_OVER_THE_PLAN = ("LMCACHE_", "VLLM_", "PROMETHEUS_MULTIPROC_DIR")
# By these, libraries below vLLM compute other numbers. The identity of KV knows only what the plan
# and `engine.env` give: two shells would make different KV with the same keys.
_NUMBERS = (
    "AITER_", "CUBLASLT_", "CUBLAS_", "DNNL_", "FLASHINFER_", "FLASH_ATTENTION_", "FLA_",
    "HIPBLASLT_", "K_SCALE_CONSTANT", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "Q_SCALE_CONSTANT",
    "ROCBLAS_", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT", "TRITON_INTERPRET",
    "V_SCALE_CONSTANT",
)  # fmt: skip


def kept_back(names: Iterable[str]) -> list[str]:
    """Return the names of those variables that services do not inherit."""
    return [name for name in names if name.startswith((*_OVER_THE_PLAN, *_NUMBERS))]
