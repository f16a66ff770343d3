"""What processes do not inherit of the shell."""

from __future__ import annotations

import pytest

from deploy.runtime.process.sessions import kept_back


@pytest.mark.parametrize(
    "name",
    ["VLLM_ATTENTION_BACKEND", "LMCACHE_CHUNK_SIZE", "K_SCALE_CONSTANT", "NVIDIA_TF32_OVERRIDE",
     "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG",
     "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "FLASHINFER_DISABLE_VERSION_CHECK", "TRITON_F32_DEFAULT",
     "ROCBLAS_INTERNAL_FP16_ALT_IMPL", "AITER_QUICK_REDUCE_QUANTIZATION"],
)  # fmt: skip
def test_what_may_change_numbers_is_kept_back(name: str) -> None:
    assert kept_back(["PATH", name]) == [name]


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY",
     "CUDA_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "NCCL_DEBUG", "OMP_NUM_THREADS", "KMP_AFFINITY",
     "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
     "HSA_OVERRIDE_GFX_VERSION"],
)  # fmt: skip
def test_places_credentials_and_speed_are_inherited(name: str) -> None:
    assert kept_back([name]) == []
