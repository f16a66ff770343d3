"""Movers between vLLM's CPU blocks and LMCache's memory objects, plain and layerwise.

A plain object holds `[layers, blocks, block_bytes]`, a layerwise one `[blocks, block_bytes]`.
LMCache gives objects a token-major shape of the same byte size, which nothing between two movers
reads.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat

from pdkit_connector.errors import TransferRefused
from pdkit_connector.in_engine.cpu_blocks import Geometry, PagedKV, object_rows
from pdkit_connector.in_engine.partial_loads import noted

if TYPE_CHECKING:
    import torch


class ChunkBlocks(NamedTuple):
    """The vLLM blocks of one chunk: the first `held` stay as they are, `blocks` are copied."""

    held: int
    blocks: torch.Tensor

    @property
    def rows(self) -> int:
        """Blocks in the whole chunk."""
        return self.held + int(self.blocks.numel())


class _BlockMover(GPUConnectorInterface):  # type: ignore[misc]
    """What both movers share: the geometry, the view of vLLM's tensors, the chunk arithmetic."""

    memory_format: MemoryFormat

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.kvcaches: list[torch.Tensor] | None = None
        self._paged: PagedKV | None = None

    def register(self, kvcaches: Sequence[torch.Tensor]) -> PagedKV:
        """Return the checked view of `kvcaches`; the same tensors are checked once."""
        known = self._paged
        if known is None or [id(t) for t in known.layers] != [id(t) for t in kvcaches]:
            known = self._paged = PagedKV(kvcaches, self.geometry)
            self.kvcaches = known.layers
        return known

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Refuse: LMCache's engine moves batches."""
        raise NotImplementedError("use batched_to_gpu")

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Refuse: LMCache's engine moves batches."""
        raise NotImplementedError("use batched_from_gpu")

    def _plan(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        kwargs: dict[str, Any],
        held_tokens: int = 0,
    ) -> tuple[PagedKV, list[ChunkBlocks]]:
        paged = self.register(kwargs["kvcaches"])
        slots = kwargs["slot_mapping"]
        if len(starts) != len(ends):
            raise TransferRefused(f"{len(starts)} chunk starts, {len(ends)} ends")
        plans = [
            self._chunk_blocks(paged, slots, start, end, held_tokens)
            for start, end in zip(starts, ends, strict=True)
        ]
        return paged, plans

    def _chunk_blocks(
        self, paged: PagedKV, slots: torch.Tensor, start: int, end: int, held_tokens: int
    ) -> ChunkBlocks:
        size = self.geometry.block_size
        if not 0 <= start < end <= slots.numel():
            raise TransferRefused(f"chunk [{start}, {end}) in a mapping of {slots.numel()} slots")
        held = min(max(held_tokens - start, 0), end - start)
        if held % size or (end - start) % size:
            raise TransferRefused(
                f"chunk [{start}, {end}), {held} tokens of it in vLLM, cuts a {size}-token block"
            )
        return ChunkBlocks(held // size, paged.blocks_of(slots[start + held : end]))

    def _check_format(self, memory_obj: Any) -> None:
        found = memory_obj.metadata.fmt
        if found != self.memory_format:
            raise TransferRefused(f"memory object in {found}, expected {self.memory_format}")


class BlockMover(_BlockMover):
    """Mover for whole chunks: all layers of a chunk in one memory object."""

    memory_format = MemoryFormat.KV_2LTD

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return LMCache's shape of `num_tokens`: [2, layers, tokens, heads x head size]."""
        import torch

        g = self.geometry
        return torch.Size([2, g.num_layers, num_tokens, g.kv_heads * g.head_size])

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Copy vLLM's blocks of each chunk into its memory object."""
        paged, plans = self._plan(starts, ends, kwargs)
        for memory_obj, plan in _paired(memory_objs, plans):
            for layer, rows in enumerate(self._layers_of(memory_obj, plan)):
                paged.read(layer, plan.blocks, rows)

    @noted
    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Copy each memory object over its vLLM blocks, sparing those vLLM already holds."""
        held_tokens = kwargs.get("vllm_cached_tokens", 0)
        paged, plans = self._plan(starts, ends, kwargs, held_tokens)
        # All objects are checked before the first byte moves: a refusal leaves vLLM's KV untouched.
        sources = [self._layers_of(obj, plan) for obj, plan in _paired(memory_objs, plans)]
        for source, plan in zip(sources, plans, strict=True):
            for layer, rows in enumerate(source):
                paged.write(layer, plan.blocks, rows[plan.held :])

    def _layers_of(self, memory_obj: Any, plan: ChunkBlocks) -> list[torch.Tensor]:
        self._check_format(memory_obj)
        layers, block_bytes = self.geometry.num_layers, self.geometry.block_bytes
        rows = object_rows(memory_obj, layers * plan.rows, block_bytes)
        return list(rows.view(layers, plan.rows, block_bytes).unbind(0))


class LayerwiseBlockMover(_BlockMover):
    """Mover for one layer at a time, by the generators that LMCache's engine drives."""

    memory_format = MemoryFormat.KV_T2D

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return LMCache's shape of one layer of `num_tokens`: [tokens, 2, heads x head size]."""
        import torch

        return torch.Size([num_tokens, 2, self.geometry.kv_heads * self.geometry.head_size])

    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[Any]],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        """Copy layer i at the i-th step, N layers in N + 1 steps; `memory_objs` is layer-major."""
        paged, plans = self._plan(starts, ends, kwargs)
        if len(memory_objs) != self.geometry.num_layers:
            raise TransferRefused(f"objects of {len(memory_objs)} layers for {self.geometry}")
        for layer, objects in enumerate(memory_objs):
            for memory_obj, plan in _paired(objects, plans):
                paged.read(layer, plan.blocks, self._rows_of(memory_obj, plan))
            yield
        yield

    def batched_to_gpu(
        self, starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> Generator[None, Sequence[Any] | None, None]:
        """Copy each layer's objects as they are sent, N layers in N + 2 steps.

        The engine primes it, sends N lists (one object a chunk), and steps once more.
        """
        held_tokens = kwargs.get("vllm_cached_tokens", 0)
        paged, plans = self._plan(starts, ends, kwargs, held_tokens)
        for layer in range(self.geometry.num_layers):
            objects = yield
            if objects is None:
                raise TransferRefused(f"no memory objects were sent for layer {layer}")
            sources = [self._rows_of(obj, plan) for obj, plan in _paired(objects, plans)]
            for source, plan in zip(sources, plans, strict=True):
                paged.write(layer, plan.blocks, source[plan.held :])
        yield
        yield

    def _rows_of(self, memory_obj: Any, plan: ChunkBlocks) -> torch.Tensor:
        self._check_format(memory_obj)
        return object_rows(memory_obj, plan.rows, self.geometry.block_bytes)


def _paired(
    memory_objs: Sequence[Any], plans: Sequence[ChunkBlocks]
) -> list[tuple[Any, ChunkBlocks]]:
    """Pair objects with chunks; refuse a short or holed list, whose tail would be misplaced."""
    if len(memory_objs) != len(plans) or any(obj is None for obj in memory_objs):
        missing = len(plans) - sum(obj is not None for obj in memory_objs)
        raise TransferRefused(f"{missing} of {len(plans)} memory objects are missing")
    return list(zip(memory_objs, plans, strict=True))
