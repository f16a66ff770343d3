"""LMCache's server copies runs of blocks between CPU engines and its memory.

LMCache 0.5.6 permutes heads and tokens of every block and then copies it element by element, at
0.4 GB/s. Here each run of consecutive blocks is one strided copy per layer, at the speed of memory.
The bytes in the server's memory and in the engines' are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# What LMCache calls its own function with.
_PARAMETERS = (
    "layer_tensors", "object_tensors", "block_ids", "n_block_ids", "blocks_per_object",
    "block_size", "format_spec", "is_d2h", "skip_prefix_n_blocks",
)  # fmt: skip


class Run(NamedTuple):
    """`count` blocks from `block` on, which are those from number `at` on of what is moved."""

    at: int
    block: int
    count: int


def copy_by_runs() -> bool:
    """Have the server of this process do so, before it starts.

    Returns:
        Whether this LMCache has the function that is replaced.
    """
    try:
        from lmcache.v1.platform.torch_ops import mp_mem_kernels
    except ImportError:
        return False
    original = getattr(mp_mem_kernels, "_transfer_per_layer_fused", None)
    if original is None or tuple(inspect.signature(original).parameters) != _PARAMETERS:
        return False

    def transfer(layers: list[torch.Tensor], *rest: Any) -> None:
        on_cpu = layers and layers[0].device.type == "cpu"
        (transfer_blocks if on_cpu else original)(layers, *rest)

    mp_mem_kernels._transfer_per_layer_fused = transfer
    return True


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
    flat = [layer.view(*layer.shape[:3], -1) for layer in layers]
    ids = [int(one) for one in block_ids[:n_block_ids]]
    width = flat[0][0].numel() // block_size
    for number, obj in enumerate(objects):
        start = number * blocks_per_object
        first = max(start, skip_prefix_n_blocks)
        moved = ids[first : start + blocks_per_object]
        if not moved:
            continue
        # [layers, blocks of the chunk, block size, …], in the order of the engine's axes.
        chunk = obj.view(len(flat), -1, block_size, width)
        for run in runs(moved):
            at = first - start + run.at
            there = chunk[:, at : at + run.count]
            for layer, rows in zip(flat, there, strict=True):
                here = layer[run.block : run.block + run.count]
                if format_spec.is_hnd:
                    here = here.transpose(1, 2)
                side = rows.view(here.shape)
                side.copy_(here) if is_d2h else here.copy_(side)


def runs(blocks: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of consecutive numbers."""
    at = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield Run(at, blocks[at], end - at)
            at = end
