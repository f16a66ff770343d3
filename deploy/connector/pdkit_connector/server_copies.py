"""LMCache's server copies KV once between CPU engines and its memory, runs of blocks at a time.

LMCache 0.5.6 copies it three times: into a buffer that a GPU would need, there from heads first to
tokens first element by element, and from there to where it belongs. Here each run of consecutive
blocks is one strided copy for each layer. The bytes in the server's memory and in the engines' are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Run(NamedTuple):
    """`blocks` blocks from `first` on, which are those from number `at` on of what is moved."""

    at: int
    first: int
    blocks: int


def copy_once() -> None:
    """Have the server of this process do so, before it starts.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    from lmcache.v1.multiprocess import object_group_transfer
    from lmcache.v1.multiprocess.modules import lmcache_driven_transfer
    from lmcache.v1.platform.devices.cpu.cache_context import CPUCacheContext
    from lmcache.v1.platform.torch_ops import mp_mem_kernels

    staged, of_any_device = (
        object_group_transfer.transfer_kv_per_object_group,
        mp_mem_kernels._transfer_per_layer_fused,
    )

    def transfer(context: Any, block_ids: Any, objects: Any, **named: Any) -> None:
        group = named["object_group_id"]
        if isinstance(context, CPUCacheContext) and InPlace.fits(context, objects, group):
            context = InPlace(context, objects, group)
            named["batch_size"] = len(objects)
        staged(context, block_ids, objects, **named)

    def copy_blocks(layers: Sequence[torch.Tensor], *rest: Any) -> None:
        on_cpu = layers and layers[0].device.type == "cpu"
        (transfer_blocks if on_cpu else of_any_device)(layers, *rest)

    lmcache_driven_transfer.transfer_kv_per_object_group = transfer
    for name in ("lmcache_memcpy_async_h2d", "lmcache_memcpy_async_d2h"):
        setattr(object_group_transfer, name, _unless_in_place(getattr(object_group_transfer, name)))
    mp_mem_kernels._transfer_per_layer_fused = copy_blocks


def _unless_in_place(copy: Callable[..., None]) -> Callable[..., None]:
    """Leave out copies of an object to itself."""

    def copied(one: Any, other: Any) -> None:
        if _address(one) != _address(other):
            copy(one, other)

    return copied


def _address(one: Any) -> Any:
    """Return the address of a tensor or of an object of LMCache."""
    return one.data_ptr() if callable(one.data_ptr) else one.data_ptr


class InPlace:
    """A CPU engine's context in LMCache, whose buffers for staging are the objects themselves."""

    def __init__(self, context: Any, objects: Sequence[Any], group: int) -> None:
        self._context = context
        self._objects = [_bytes_of(one) for one in objects]
        self._first, _ = _places(context, group)

    @staticmethod
    def fits(context: Any, objects: Sequence[Any], group: int) -> bool:
        """Tell whether all objects are there, with all tokens of their chunks."""
        first, end = _places(context, group)
        return (
            context.kv_layer_groups_manager.get_attn_desc().is_full_attention(group)
            and all(one is not None and one.raw_tensor is not None for one in objects)
            and all(one.get_size() == end - first for one in objects)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def get_temp_object_group_buffer(self, index: int, group: int) -> torch.Tensor:  # noqa: ARG002
        """Return an object's memory."""
        return self._objects[index]

    def get_temp_kernel_group_buffer(self, index: int, kernel_group: int) -> torch.Tensor:
        """Return the part of an object's memory that some of its layers have."""
        offsets = self._context.tmp_chunk_group_offsets_
        start, end = offsets[kernel_group] - self._first, offsets[kernel_group + 1] - self._first
        return self._objects[index][start:end]


def _places(context: Any, group: int) -> tuple[int, int]:
    """Return the range of bytes that a group of layers has in a chunk's staging buffer."""
    of_group = context.kv_layer_groups_manager.object_groups[group].kernel_group_indices
    offsets = context.tmp_chunk_group_offsets_
    return offsets[of_group[0]], offsets[of_group[-1] + 1]


def _bytes_of(memory_obj: Any) -> torch.Tensor:
    import torch

    whole: torch.Tensor = memory_obj.raw_tensor.view(torch.uint8)
    return whole[: memory_obj.get_size()]


def transfer_blocks(  # noqa: PLR0913, PLR0917 - as LMCache calls it
    layers: Sequence[torch.Tensor],
    objects: Sequence[torch.Tensor],
    block_ids: torch.Tensor | Sequence[int],
    n_block_ids: int,
    blocks_per_object: int,
    block_size: int,
    format_spec: Any,
    is_d2h: bool,
    skip_prefix_n_blocks: int,
) -> None:
    """Copy blocks between layers and objects.

    Args:
        layers: of an engine, each [blocks, heads, block size, head size], or with heads and block
            size the other way round; the last axis may be two, K and V.
        objects: of the server, one a chunk, whose memory is [layers, tokens, heads x head size].
        block_ids: the engine's blocks, those of one chunk after the other.
        n_block_ids: how many of them count.
        blocks_per_object: blocks of a chunk.
        block_size: tokens of a block.
        format_spec: says by `is_hnd` whether heads come before tokens in a block.
        is_d2h: from the engine to the server.
        skip_prefix_n_blocks: the first of `block_ids` that stay as they are.
    """
    flat = [_wide(layer.view(*layer.shape[:3], -1)) for layer in layers]
    ids = [int(one) for one in block_ids[:n_block_ids]]
    width = flat[0][0].numel() // block_size
    for number, obj in enumerate(objects):
        start = number * blocks_per_object
        first = max(start, skip_prefix_n_blocks)
        moved = ids[first : start + blocks_per_object]
        if not moved:
            continue
        # [layers, blocks of the chunk, block size, …], in the order of the engine's axes.
        chunk = obj.view(-1).view(flat[0].dtype).view(len(flat), -1, block_size, width)
        for run in runs(moved):
            at = first - start + run.at
            there = chunk[:, at : at + run.blocks]
            for layer, rows in zip(flat, there, strict=True):
                here = layer[run.first : run.first + run.blocks]
                if format_spec.is_hnd:
                    here = here.transpose(1, 2)
                side = rows.view(here.shape)
                side.copy_(here) if is_d2h else here.copy_(side)


def _wide(layer: torch.Tensor) -> torch.Tensor:
    """Return the same memory in elements of eight bytes, which are copied faster."""
    import torch

    row = layer.shape[-1] * layer.element_size()
    return layer if row % 8 else layer.view(torch.int64)


def runs(blocks: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of consecutive numbers."""
    at = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield Run(at, blocks[at], end - at)
            at = end
