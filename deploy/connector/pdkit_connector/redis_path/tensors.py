"""The tensors that an engine stores and loads, by its own metadata and never by a value in Redis.

The code that copies KV trusts the shape: a tensor of another shape would be copied to the wrong
place, or from beyond its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat

from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.value import BadValue, Header

TensorType = tuple[torch.Size, torch.dtype, MemoryFormat]
# How a header describes a tensor: dtype, shape, format, bytes.
_Said = tuple[str, tuple[int, ...], int, int]


class OwnTensors:
    """What one value of this engine may hold: a whole chunk, or a layer of it."""

    def __init__(self, config: Any, metadata: Any) -> None:
        """Raise ConnectorError if values could have any length."""
        if config.save_unfull_chunk:
            raise ConnectorError(
                "save_unfull_chunk: true does not work with the Redis path: only the value "
                "itself would show how many tokens it has; set save_unfull_chunk: false"
            )
        self._config = config
        self._metadata = metadata
        self._known: dict[_Said, TensorType] = {}

    def of(self, header: Header) -> TensorType:
        """Return the tensor that a header describes; raise BadValue if it does not fit."""
        said = (header.dtype, header.shape, header.memory_format, header.payload_bytes)
        if said not in self._known:
            # LMCache looks at vLLM's tensors only when it first moves KV.
            self._known = dict(self._all())
        try:
            return self._known[said]
        except KeyError:
            raise BadValue(
                "foreign",
                f"it holds {header.payload_bytes} bytes of {header.dtype} {header.shape}, unlike "
                "any chunk of this engine",
            ) from None

    def _all(self) -> Iterator[tuple[_Said, TensorType]]:
        memory_format = self._format()
        for shape, dtype in self._shapes():
            name = str(dtype).removeprefix("torch.")
            size = shape.numel() * dtype.itemsize
            yield (name, tuple(shape), memory_format.value, size), (shape, dtype, memory_format)

    def _format(self) -> MemoryFormat:
        if self._metadata.use_mla:
            return MemoryFormat.KV_MLA_FMT
        if not self._config.use_layerwise:
            return MemoryFormat.KV_2LTD
        return MemoryFormat.KV_2TD if self._config.enable_blending else MemoryFormat.KV_T2D

    def _shapes(self) -> Iterator[tuple[torch.Size, torch.dtype]]:
        facts, tokens = self._metadata, self._config.chunk_size
        layers, planes, _, heads, head_size = facts.kv_shape
        hidden = heads * head_size
        if self._config.use_layerwise:
            of_layer = {
                MemoryFormat.KV_MLA_FMT: (tokens, hidden),
                MemoryFormat.KV_2TD: (planes, tokens, hidden),
                MemoryFormat.KV_T2D: (tokens, planes, hidden),
            }
            yield torch.Size(of_layer[self._format()]), facts.kv_dtype
            return
        yield torch.Size((planes, layers, tokens, hidden)), facts.kv_dtype
        # What vLLM's own tensors are, where LMCache has looked. Several groups of layers are
        # several tensors, for which a header has no room.
        if hasattr(facts, "get_shapes") and len(shapes := facts.get_shapes(tokens)) == 1:
            yield shapes[0], facts.get_dtypes()[0]
