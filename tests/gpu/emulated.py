"""One emulated GPU for the Python code of vLLM's CUDA wheels. All that is stubbed stands here.

Nothing is computed: what is tested is which way vLLM's own Python code decides to go.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from types import SimpleNamespace
from typing import Any

GPUS = 8

# Module → what its stub hides. They are imported and empty; no test calls into one.
MODULES = {
    "vllm._C": "vLLM's kernels, before they moved to the stable ABI",
    "vllm._C_stable_libtorch": "vLLM's kernels",
    "vllm._moe_C": "kernels of mixtures of experts, before they moved to the stable ABI",
    "vllm._moe_C_stable_libtorch": "kernels of mixtures of experts",
    "vllm._rocm_C": "kernels for AMD GPUs",
    "vllm.vllm_flash_attn._vllm_fa2_C": "FlashAttention 2",
    "vllm.vllm_flash_attn._vllm_fa3_C": "FlashAttention 3",
}

# Operator of vLLM's that is asked while modules are imported → what its "no" hides.
OPERATORS = {
    "cutlass_scaled_mm_supports_fp8": "FP8 kernels",
    "cutlass_scaled_mm_supports_block_fp8": "FP8 kernels with block scales",
    "cutlass_group_gemm_supported": "grouped FP8 kernels of mixtures of experts",
}


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_where: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name in MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(vendor: str) -> None:
    """Make vLLM's code believe that it runs on eight H100s ("cuda") or MI300Xs ("rocm")."""
    sys.meta_path.insert(0, _Stubs())
    _operators()
    _torch(vendor)
    import vllm.platforms

    # What vLLM's own detection would give; it asks NVML or amdsmi.
    vllm.platforms._current_platform = {"cuda": _h100, "rocm": _mi300x}[vendor]()
    _triton()
    _model_inspection()


def _operators() -> None:
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda _capability: False, "CompositeImplicitAutograd")
    _kept.append(library)  # its operators go with it


_kept: list[Any] = []


def _torch(vendor: str) -> None:
    """Let torch, built for CPUs, count GPUs. Hides that no tensor can be put on one."""
    import torch

    mi300x = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4,
        multi_processor_count=304, total_memory=192 << 30,
    )  # fmt: skip
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GPUS
    if vendor == "rocm":
        torch.version.hip = "7.2.0"
        torch.cuda.get_device_properties = lambda *_device: mi300x
        torch.cuda.get_device_capability = lambda *_device: (mi300x.major, mi300x.minor)


def _says(answer: Any) -> Any:
    """Return a class method that gives this answer for every device."""
    return classmethod(lambda *_args, **_kwargs: answer)


def _h100() -> Any:
    """Return vLLM's CUDA platform without NVML: hides how it finds GPUs and their links."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):  # type: ignore[misc]
        get_device_capability = _says(DeviceCapability(9, 0))
        get_device_name = _says("NVIDIA H100 80GB HBM3")
        get_device_uuid = _says("GPU-0")
        get_device_total_memory = _says(80 << 30)
        is_fully_connected = _says(True)
        device_count = _says(GPUS)
        get_global_graph_pool = _says(None)  # hides the memory of CUDA graphs
        log_warnings = _says(None)

    return H100()


def _mi300x() -> Any:
    """Return vLLM's ROCm platform; without amdsmi it takes what torch says of the GPU."""
    from vllm.platforms.rocm import RocmPlatform

    class MI300X(RocmPlatform):  # type: ignore[misc]
        get_device_name = _says("AMD_Instinct_MI300X_OAM")
        get_device_uuid = _says("GPU-0")
        is_fully_connected = _says(True)
        device_count = _says(GPUS)
        get_global_graph_pool = _says(None)  # hides the memory of CUDA graphs

    return MI300X()


def _triton() -> None:
    """Let vLLM's configuration find Triton. Hides Triton's kernels, whose decorators do nothing."""
    import vllm.triton_utils as utils

    utils.triton.Config = lambda kwargs, **more: SimpleNamespace(
        **{"kwargs": kwargs, "num_stages": 1, "num_warps": 4, **more}
    )
    importlib.import_module("vllm.config.vllm").HAS_TRITON = True


def _model_inspection() -> None:
    """Let vLLM inspect a model's class in this process: a new one would have no stubs."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: (
        registry._ModelInfo.from_model_cls(self.load_model_cls())
    )
