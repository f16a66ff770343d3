"""LMCache's transfer kernels and the card they run on, played on a CPU.

Only addresses are played: which element of a layer's memory meets which element of the memory
object, by format, as the kernels of the releases compute it. Tensors lie in ordinary memory and say
that they are on a card, which is what LMCache's mover asks of them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CARD = SimpleNamespace(type="cuda", index=0)

# The formats that releases without a stand-in of their own expect of the native module.
_FORMATS = (
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "NL_X_NB_BS_HS",
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
)
_PACKED_NHD = "NL_X_NB_BS_NH_CS"
_PACKED_HND = "NL_X_NB_NH_BS_CS"
_ONE_PLANE = ("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", _PACKED_NHD, _PACKED_HND)


class OnCard(torch.Tensor):
    """A tensor that says it is on a card."""

    @property
    def device(self) -> Any:
        """The card."""
        return CARD


class _Stream:
    def synchronize(self) -> None:
        """Do nothing: all is done when it was asked for."""


class Kernels:
    """What stands in for the native module; it knows the layers whose pointers it is given."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.TransferDirection = enum.Enum("TransferDirection", ("H2D", "D2H"))
        self.GPUKVFormat = self.EngineKVFormat = enum.Enum("GPUKVFormat", _FORMATS)
        self.calls = 0

    def know(self, layers: list[torch.Tensor]) -> None:
        """Let pointers to `layers` be followed, within each layer and no further."""
        for layer in layers:
            plain = layer.as_subclass(torch.Tensor)
            self.memory[layer.data_ptr()] = plain.as_strided((plain.numel(),), (1,))

    def multi_layer_kv_transfer(  # noqa: PLR0917 - as the kernels are called
        self, key_value: Any, pointers: Any, slots: Any, _device: Any, page_slots: int,
        direction: Any, kind: Any, block_size: int = 0, skipped: int = 0, *,
        head_size: int = 0, skip_prefix_n_tokens: int = 0, block_stride_elems: int = 0,
    ) -> None:  # fmt: skip
        """Move every element of `key_value` whose token has a slot, as one thread each would."""
        # Before formats had names there was one, and whether it was for MLA.
        name = getattr(kind, "name", _FORMATS[3 if kind is True else 1])
        to_object = direction is True or getattr(direction, "name", "") == "D2H"
        self.calls += 1
        target = key_value.as_subclass(torch.Tensor)
        first = skipped or skip_prefix_n_tokens
        layers, width = target.shape[1], target.shape[3]
        flat = target.reshape(-1)
        assert flat.data_ptr() == target.data_ptr(), "a memory object with gaps"
        tokens = torch.arange(first, len(slots)).unsqueeze(1)
        slots = slots.as_subclass(torch.Tensor)[first:].unsqueeze(1)
        tokens, slots = tokens[slots[:, 0] >= 0], slots[slots[:, 0] >= 0]
        inner = torch.arange(width).unsqueeze(0)
        for plane in range(1 if name in _ONE_PLANE else 2):
            there = _address(
                name, plane, slots, inner, width, page_slots, block_size, head_size,
                block_stride_elems,
            )  # fmt: skip
            for layer in range(layers):
                here = ((plane * layers + layer) * target.shape[2] + tokens) * width + inner
                memory = self.memory[int(pointers[layer])]
                if to_object:
                    flat[here] = memory[there]
                else:
                    memory[there] = flat[here]


def _address(  # noqa: PLR0917 - as the kernels compute it
    name: str, plane: int, slots: Any, inner: Any, width: int, page_slots: int, block_size: int,
    head_size: int, block_stride: int,
) -> Any:  # fmt: skip
    """Return the element of a layer's memory for each slot (rows) and element of it (columns)."""
    if name in ("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS"):
        return slots * width + inner
    if name in ("NL_X_TWO_NB_BS_NH_HS", "NB_NL_TWO_BS_NH_HS"):
        return (plane * page_slots + slots) * width + inner
    block, offset = slots // block_size, slots % block_size
    if name == "NL_X_NB_TWO_BS_NH_HS":
        return ((block * 2 + plane) * block_size + offset) * width + inner
    if name == _PACKED_NHD:
        return block * (block_stride or block_size * width) + offset * width + inner
    if name == _PACKED_HND:
        both = 2 * head_size
        step = block_stride or width // both * block_size * both
        head, element = inner // both, inner % both
        return block * step + (head * block_size + offset) * both + element
    raise RuntimeError(f"Unsupported format {name}")


def mover_module() -> ModuleType:
    """Return the module in which this release has its movers."""
    try:
        return importlib.import_module("lmcache.v1.gpu_connector.gpu_connectors")
    except ModuleNotFoundError:
        return importlib.import_module("lmcache.v1.gpu_connector")


def play(kernels: Kernels) -> Any:
    """Put the kernels and a card into this process for good; return the plain mover's class."""
    module = mover_module()
    ops = getattr(module, "device_ops", None) or getattr(module, "lmc_ops", None)
    if ops is None:
        for name in (module.__name__, "lmcache.v1.gpu_connector.utils"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name).lmc_ops = kernels  # type: ignore[attr-defined]
    else:
        ops.multi_layer_kv_transfer = kernels.multi_layer_kv_transfer
    for name in (
        "lmcache.v1.gpu_connector.utils",
        "lmcache.v1.gpu_connector.kv_format.detectors.vllm",
    ):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(name)
            if hasattr(found, "torch_device_type"):
                found.torch_device_type = "cuda"
    empty = torch.empty

    def empty_on_card(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is CARD:
            return empty(*args, **kwargs).as_subclass(OnCard)
        return empty(*args, device=device, **kwargs)

    torch.empty = empty_on_card  # type: ignore[assignment]
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment,misc]
    return module.VLLMPagedMemGPUConnectorV2  # type: ignore[attr-defined]
