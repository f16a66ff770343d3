"""vLLM-like KV tensors and LMCache memory objects for the mover's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.in_engine.cpu_blocks import Geometry
from pdkit_connector.in_engine.cpu_mover import BlockMover, LayerwiseBlockMover


@dataclass
class Case:
    """One model's KV, a chunk size and the allocator of its memory objects."""

    geometry: Geometry
    dtype: torch.dtype
    chunk: int
    num_blocks: int
    allocator: HostMemoryAllocator

    def kv(self, seed: int) -> list[torch.Tensor]:
        """Return one random tensor a layer; every bit pattern may occur, NaNs too."""
        make = torch.Generator().manual_seed(seed)
        shape = (*self.geometry.layer_shape(self.num_blocks)[:-1], -1)
        size = self.num_blocks * self.geometry.block_bytes
        return [
            torch.randint(0, 256, (size,), generator=make, dtype=torch.uint8)
            .view(self.dtype)
            .view(shape)
            for _ in range(self.geometry.num_layers)
        ]

    def table(self, blocks: int, seed: int) -> list[int]:
        """Return a random block table; block 0 is nobody's."""
        return random.Random(seed).sample(range(1, self.num_blocks), blocks)

    def slots(self, table: list[int]) -> torch.Tensor:
        """Return the slot of every token of `table`, as LMCache's adapter computes it."""
        size = self.geometry.block_size
        starts = torch.tensor(table, dtype=torch.int64).unsqueeze(1) * size
        return (starts + torch.arange(size)).flatten()

    def spans(self, tokens: int) -> tuple[list[int], list[int]]:
        """Return the starts and ends of the chunks of `tokens`."""
        starts = list(range(0, tokens, self.chunk))
        return starts, [start + self.chunk for start in starts]

    def plain(self, count: int) -> list[Any]:
        """Return `count` memory objects of whole chunks."""
        shape = BlockMover(self.geometry).get_shape(self.chunk)
        return [
            self.allocator.allocate([shape], [self.dtype], MemoryFormat.KV_2LTD)
            for _ in range(count)
        ]

    def layered(self, count: int) -> list[list[Any]]:
        """Return memory objects of one layer of a chunk, layer-major."""
        shape = LayerwiseBlockMover(self.geometry).get_shape(self.chunk)
        return [
            self.allocator.batched_allocate(shape, self.dtype, count, MemoryFormat.KV_T2D)
            for _ in range(self.geometry.num_layers)
        ]


def make_case(
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 3,
    heads: int = 2,
    block: int = 32,
    head: int = 32,
    chunk: int = 64,
    num_blocks: int = 24,
) -> Case:
    """Return a case; its allocator holds 8 MiB."""
    geometry = Geometry(layers, heads, block, head, dtype.itemsize)
    return Case(geometry, dtype, chunk, num_blocks, HostMemoryAllocator(8 << 20))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bit patterns, so that NaNs compare too."""
    return torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def store_plain(case: Case, kv: list[torch.Tensor], table: list[int]) -> list[Any]:
    """Store every chunk of `table` and return its memory objects."""
    slots = case.slots(table)
    starts, ends = case.spans(len(slots))
    objects = case.plain(len(starts))
    BlockMover(case.geometry).batched_from_gpu(
        objects, starts, ends, kvcaches=kv, slot_mapping=slots
    )
    return objects


def load_plain(
    case: Case, kv: list[torch.Tensor], table: list[int], objects: list[Any], held: int = 0
) -> None:
    """Load memory objects over the blocks of `table`."""
    slots = case.slots(table)
    BlockMover(case.geometry).batched_to_gpu(
        objects, *case.spans(len(slots)), kvcaches=kv, slot_mapping=slots, vllm_cached_tokens=held
    )


def store_layered(case: Case, kv: list[torch.Tensor], table: list[int]) -> list[list[Any]]:
    """Store layer by layer with the steps that LMCache's engine takes."""
    slots = case.slots(table)
    starts, ends = case.spans(len(slots))
    objects = case.layered(len(starts))
    steps = LayerwiseBlockMover(case.geometry).batched_from_gpu(
        objects, starts, ends, kvcaches=kv, slot_mapping=slots, sync=True
    )
    for _ in range(case.geometry.num_layers + 1):
        next(steps)
    assert next(steps, "end") == "end"
    return objects


def load_layered(
    case: Case, kv: list[torch.Tensor], table: list[int], objects: list[list[Any]], held: int = 0
) -> None:
    """Load layer by layer with the steps that LMCache's engine takes."""
    slots = case.slots(table)
    steps = LayerwiseBlockMover(case.geometry).batched_to_gpu(
        *case.spans(len(slots)), kvcaches=kv, slot_mapping=slots, vllm_cached_tokens=held, sync=True
    )
    next(steps)
    for layer in objects:
        steps.send(layer)
    next(steps)
    assert next(steps, "end") == "end"
