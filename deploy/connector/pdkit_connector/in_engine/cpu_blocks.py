"""vLLM's paged KV on a CPU, seen as rows of opaque bytes: one row a block, one table a layer.

A block's interior depends on vLLM's version, the data type and the instruction set (AMX keeps keys
in tiles), so nothing here reads it. Only whole blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkit_connector.errors import TransferRefused, UnsupportedSetting

if TYPE_CHECKING:
    import torch

# vLLM's pool never hands out block 0: it means "no block" in block tables.
NULL_BLOCK = 0


@dataclass(frozen=True)
class Geometry:
    """The shape of the KV of one engine rank, in elements unless the name says bytes."""

    num_layers: int
    kv_heads: int
    block_size: int
    head_size: int
    itemsize: int

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block of one layer."""
        return self.kv_heads * self.block_size * 2 * self.head_size * self.itemsize

    def layer_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape that vLLM's CPU attention gives to one layer."""
        return (num_blocks, self.kv_heads, self.block_size, 2 * self.head_size)


class PagedKV:
    """The KV tensors of every layer as `[num_blocks, words]` tables over the same memory."""

    def __init__(self, layers: Sequence[torch.Tensor], geometry: Geometry) -> None:
        """Check `layers` against `geometry`; raise UnsupportedSetting on anything unexpected."""
        _check_layers(layers, geometry)
        self.layers = list(layers)
        self.geometry = geometry
        self.num_blocks = int(layers[0].shape[0])
        self._tables = [_block_table(layer, geometry.block_bytes) for layer in layers]

    def read(self, layer: int, blocks: torch.Tensor, into: torch.Tensor) -> None:
        """Copy `blocks` of one layer into `into`, uint8 `[len(blocks), block_bytes]`."""
        import torch

        table, target = _same_words(self._tables[layer], into)
        torch.index_select(table, 0, blocks, out=target)

    def write(self, layer: int, blocks: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, uint8 `[len(blocks), block_bytes]`, over `blocks` of one layer."""
        table, words = _same_words(self._tables[layer], source)
        table.index_copy_(0, blocks, words)

    def blocks_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the block ids that `slots`, int64 `[tokens]`, fill from end to end.

        Raises TransferRefused unless every run of block_size slots is one whole block in order.
        """
        import torch

        size = self.geometry.block_size
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise TransferRefused(
                f"slot mapping is {slots.dtype} of rank {slots.dim()}, not int64 of 1"
            )
        if slots.numel() % size:
            raise TransferRefused(
                f"{slots.numel()} slots are not a whole number of {size}-token blocks"
            )
        runs = slots.reshape(-1, size)
        blocks = runs[:, 0].div(size, rounding_mode="floor")
        whole = blocks.unsqueeze(1) * size + torch.arange(size, dtype=torch.int64)
        if not torch.equal(runs, whole):
            raise TransferRefused(f"slot mapping does not walk whole {size}-token blocks in order")
        self._check_ids(blocks)
        return blocks

    def _check_ids(self, blocks: torch.Tensor) -> None:
        import torch

        if not blocks.numel():
            return
        low, high = int(blocks.min()), int(blocks.max())
        if low <= NULL_BLOCK or high >= self.num_blocks:
            raise TransferRefused(
                f"slot mapping names blocks {low}..{high}; a request owns 1..{self.num_blocks - 1}"
            )
        if torch.unique(blocks).numel() != blocks.numel():
            raise TransferRefused("slot mapping names one block twice")


def object_rows(memory_obj: Any, rows: int, block_bytes: int) -> torch.Tensor:
    """Return the bytes of an LMCache memory object as uint8 `[rows, block_bytes]`, not copied.

    Raises TransferRefused where the object is gone or its size is not rows x block_bytes.
    """
    import torch

    tensor = memory_obj.tensor
    if tensor is None:
        raise TransferRefused("the memory object was released before the copy")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TransferRefused(f"memory object on {tensor.device}, or not contiguous")
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() != rows * block_bytes:
        raise TransferRefused(
            f"memory object of {flat.numel()} bytes for {rows} rows of {block_bytes} bytes"
        )
    return flat.view(rows, block_bytes)


def _check_layers(layers: Sequence[torch.Tensor], geometry: Geometry) -> None:
    if len(layers) != geometry.num_layers:
        raise UnsupportedSetting(
            f"vLLM holds KV of {len(layers)} layers, LMCache expects {geometry}"
        )
    num_blocks = int(layers[0].shape[0])
    for index, layer in enumerate(layers):
        expected = geometry.layer_shape(num_blocks)
        if tuple(layer.shape) != expected or layer.element_size() != geometry.itemsize:
            raise UnsupportedSetting(
                f"KV of layer {index} is {tuple(layer.shape)} of {layer.dtype}; the CPU mover "
                f"knows only {expected} with {geometry.itemsize}-byte elements"
            )
        if layer.device.type != "cpu":
            raise UnsupportedSetting(f"KV of layer {index} is on {layer.device}, not on the CPU")
        if not layer[0].is_contiguous() or layer.stride(0) < layer[0].numel():
            raise UnsupportedSetting(
                f"KV of layer {index} has strides {layer.stride()}: its blocks are not contiguous"
            )


def _block_table(layer: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """View a layer as uint8 `[num_blocks, block_bytes]`; blocks may have gaps between them."""
    import torch

    num_blocks, stride = layer.shape[0], layer.stride(0)
    rows = layer.as_strided((num_blocks, block_bytes // layer.element_size()), (stride, 1))
    return rows.view(torch.uint8)


def _same_words(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both uint8 tables as int64 where both allow it: index_copy_ is per element."""
    import torch

    word = torch.int64.itemsize
    if all(
        part % word == 0
        for table in (left, right)
        for part in (table.shape[1], table.stride(0), table.storage_offset())
    ):
        return left.view(torch.int64), right.view(torch.int64)
    return left, right
