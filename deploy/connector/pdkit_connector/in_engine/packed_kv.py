"""Movement of vLLM's packed KV, `[blocks, heads, block_size, 2 x head_size]`, by LMCache's mover.

LMCache's kernels move one row of `hidden` elements a slot and plane. Every release has a format
whose address is slot x row width and nothing else, the one for MLA. Seen as rows of head_size
elements, K and V of a token and head are two rows of a packed layer: so a second mover in that
format, given row numbers as slots, moves K and V into the planes of an ordinary memory object,
`[2, layers, tokens, heads x head_size]`. Objects mean what they mean for any other KV layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdkit_connector.errors import TransferRefused, UnsupportedSetting
from pdkit_connector.in_engine.partial_loads import noted

if TYPE_CHECKING:
    import torch

_PACKED_DIMS = 4
# The kernels compute addresses in 32-bit integers, in words of at most 8 bytes.
_MAX_WORDS = 2**31
# LMCache takes uint8 rows of this width for an index cache with scales behind its values.
_INDEXER_ROW = 132


@dataclass(frozen=True)
class PackedLayout:
    """Where the rows of a packed layer lie; a row is head_size elements of K or of V."""

    name: str
    num_blocks: int
    heads: int
    block_size: int
    head_size: int
    itemsize: int

    @classmethod
    def of(cls, layer: torch.Tensor) -> PackedLayout:
        """Read the layout off a layer; raise UnsupportedSetting for an untested one."""
        num_blocks, heads, block_size, content = layer.shape
        block = heads * block_size * content
        tested = {
            "NHD": (block, content, heads * content, 1),
            "HND": (block, block_size * content, content, 1),
        }
        fitting = [name for name, strides in tested.items() if _same_strides(layer, strides)]
        if not fitting or content % 2:
            raise UnsupportedSetting(
                f"packed KV of shape {tuple(layer.shape)} with strides {layer.stride()} lies "
                "neither tokens before heads (LBNHC) nor heads before tokens (LBHNC), whole "
                "layers apart; set VLLM_KV_CACHE_LAYOUT to one of them"
            )
        layout = cls(fitting[0], num_blocks, heads, block_size, content // 2, layer.element_size())
        layout._check_addresses()
        return layout

    def _check_addresses(self) -> None:
        row_bytes = self.head_size * self.itemsize
        word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
        words = self.num_blocks * self.heads * self.block_size * 2 * row_bytes // word
        if words >= _MAX_WORDS:
            raise UnsupportedSetting(
                f"a layer's packed KV of {words * word} bytes is beyond LMCache's 32-bit "
                "addresses; lower --gpu-memory-utilization or --num-gpu-blocks-override"
            )
        if self.itemsize == 1 and self.head_size == _INDEXER_ROW:
            raise UnsupportedSetting(f"LMCache takes rows of {_INDEXER_ROW} bytes for an index")

    @property
    def rows_per_block(self) -> int:
        """Rows of K and V in one block."""
        return self.heads * self.block_size * 2

    def rows(self, layer: torch.Tensor) -> torch.Tensor:
        """View a layer as `[num_blocks, rows_per_block, head_size]`, in the order of memory."""
        return layer.as_strided(
            (self.num_blocks, self.rows_per_block, self.head_size),
            (self.rows_per_block * self.head_size, self.head_size, 1),
        )

    def key_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the row of K of each token and head, int64 `[tokens x heads]`; V is the next.

        `slots` is int64 `[tokens]`; a negative one, which means no slot, stays negative.
        """
        import torch

        token_step, head_step = (self.heads, 1) if self.name == "NHD" else (1, self.block_size)
        blocks = slots.div(self.block_size, rounding_mode="floor")
        tokens = blocks * (self.heads * self.block_size) + (slots % self.block_size) * token_step
        heads = torch.arange(self.heads, dtype=torch.int64, device=slots.device) * head_step
        rows = 2 * (tokens.unsqueeze(1) + heads)
        return rows.masked_fill((slots < 0).unsqueeze(1), -2).flatten()


def _same_strides(layer: torch.Tensor, strides: Sequence[int]) -> bool:
    # The stride of a dimension of size 1 is never used.
    return all(
        size == 1 or found == wanted
        for size, found, wanted in zip(layer.shape, layer.stride(), strides, strict=True)
    )


def is_packed(kvcaches: Any) -> bool:
    """Whether these are vLLM's KV tensors, one a layer, with K and V in one of four dimensions."""
    return bool(
        isinstance(kvcaches, list | tuple)
        and kvcaches
        and getattr(kvcaches[0], "ndim", 0) == _PACKED_DIMS
    )


def common_layout(layers: Sequence[torch.Tensor]) -> PackedLayout:
    """Return the layout that all layers share; raise UnsupportedSetting where they differ."""
    layouts = {PackedLayout.of(layer) if layer.ndim == _PACKED_DIMS else None for layer in layers}
    layout = next(iter(layouts))
    if layout is None or len(layouts) != 1:
        raise UnsupportedSetting(f"vLLM's KV tensors differ from layer to layer: {layouts}")
    return layout


class PackedMover:
    """LMCache's own mover of rows, driven once for K and once for V of each chunk."""

    def __init__(self, connector: Any, layers: Sequence[torch.Tensor]) -> None:
        """Take the place of `connector`, whose streams and buffer serve on, for these layers."""
        self.layers = list(layers)
        self.layout = common_layout(layers)
        self._store_stream = connector.store_stream
        held = self.layout.heads * self.layout.head_size
        if connector.use_mla or held != connector.hidden_dim_size:
            raise UnsupportedSetting(
                f"vLLM's packed KV holds {held} elements of K a token, LMCache expects "
                f"{connector.hidden_dim_size}, MLA: {connector.use_mla}"
            )
        if len(self.layers) != connector.num_layers:
            raise UnsupportedSetting(
                f"vLLM holds KV of {len(layers)} layers, LMCache expects {connector.num_layers}"
            )
        self._rows = self._row_mover(connector)

    def _row_mover(self, connector: Any) -> Any:
        """Return a mover of the same class whose slots are rows."""
        rows = type(connector)(self.layout.head_size, connector.num_layers, use_mla=True)
        rows.store_stream = connector.store_stream
        rows.load_stream = connector.load_stream
        rows.kvcaches = [self.layout.rows(layer) for layer in self.layers]
        if connector.gpu_buffer is not None:
            rows.gpu_buffer = self._planes(connector.gpu_buffer)[:1]
        return rows

    def serves(self, layers: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors that this mover was made for."""
        return len(layers) == len(self.layers) and all(map(_identical, layers, self.layers))

    @noted
    def load(self, memory_obj: Any, start: int, end: int, kwargs: Mapping[str, Any]) -> None:
        """Copy a memory object over the slots of its chunk, sparing tokens vLLM already holds."""
        held = min(max(kwargs.get("vllm_cached_tokens", 0) - start, 0), end - start)
        if held == end - start:
            return
        _require_split_planes(memory_obj)
        rows = self.layout.key_rows(self._slots(start, end, kwargs))
        for plane, tensor in enumerate(self._object_planes(memory_obj, end - start)):
            self._rows.to_gpu(
                _as_rows(tensor),
                0,
                rows.numel(),
                slot_mapping=rows + plane,
                vllm_cached_tokens=held * self.layout.heads,
            )

    def store(self, memory_obj: Any, start: int, end: int, kwargs: Mapping[str, Any]) -> None:
        """Copy the slots of a chunk into its memory object."""
        import torch

        slots = self._slots(start, end, kwargs)
        planes = self._object_planes(memory_obj, end - start)
        # The row numbers are made on the stream that reads them.
        with torch.cuda.stream(self._store_stream):
            rows = self.layout.key_rows(slots)
            numbers = (rows, rows + 1)
        for tensor, mapping in zip(planes, numbers, strict=True):
            self._rows.from_gpu(_as_rows(tensor), 0, rows.numel(), slot_mapping=mapping)

    def _slots(self, start: int, end: int, kwargs: Mapping[str, Any]) -> torch.Tensor:
        if "slot_mapping" not in kwargs:
            raise TransferRefused("no slot_mapping was given")
        slots: torch.Tensor = kwargs["slot_mapping"]
        if not 0 <= start < end <= slots.numel():
            raise TransferRefused(f"chunk [{start}, {end}) in a mapping of {slots.numel()} slots")
        return slots[start:end]

    def _object_planes(self, memory_obj: Any, tokens: int) -> list[torch.Tensor]:
        tensor = memory_obj.tensor
        layout = self.layout
        expected = 2 * len(self.layers) * tokens * layout.heads * layout.head_size
        if tensor is None or tensor.numel() != expected or tensor.element_size() != layout.itemsize:
            shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            raise TransferRefused(
                f"memory object {shape} for {tokens} tokens of {len(self.layers)} layers, "
                f"{expected} elements of {layout.itemsize} bytes"
            )
        return list(self._planes(tensor).split(1))

    def _planes(self, tensor: torch.Tensor) -> torch.Tensor:
        """View the memory of an object as `[2, layers, tokens x heads, head_size]`."""
        return tensor.view(2, len(self.layers), -1, self.layout.head_size)


def _identical(left: object, right: object) -> bool:
    return left is right


def _as_rows(tensor: torch.Tensor) -> Any:
    """Build the memory object of rows that a mover takes."""
    from lmcache.v1.memory_management import MemoryFormat

    return SimpleNamespace(tensor=tensor, metadata=SimpleNamespace(fmt=MemoryFormat.KV_MLA_FMT))


def _require_split_planes(memory_obj: Any) -> None:
    from lmcache.v1.memory_management import MemoryFormat

    if memory_obj.metadata.fmt != MemoryFormat.KV_2LTD:
        raise TransferRefused(
            f"memory object in {memory_obj.metadata.fmt}, expected {MemoryFormat.KV_2LTD}"
        )
