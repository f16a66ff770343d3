"""The objects of LMCache's server: their names in Redis, and the headers of their values.

An object's key names model, rank and tokens, but not what its bytes are. The name here has the
shapes and data types, too: what another model or setting stored is never found.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch

from pdkit_connector.redis_path.value import HEADER_BYTES, Codec, Header, digest
from pdkit_connector.releases import installed_lmcache, installed_vllm

# A header has room for one tensor; an object of several is described by its bytes and its name.
_SEVERAL = "several"


def object_layout() -> str:
    """Name what the bytes of an object depend on and its key does not say.

    They are an engine's blocks as they are. On CPUs vLLM lays them out by instruction set, and
    neither vLLM nor LMCache is held to keep a layout from one release to the next. Beside GPUs, the
    processor does not matter: hosts with others share KV.
    """
    processor: tuple[str, ...] = ()
    if torch.version.cuda is None and torch.version.hip is None:
        processor = (
            platform.machine(),
            f"avx512={torch.cpu._is_avx512_supported()}",
            f"amx={torch.cpu._is_amx_tile_supported()}",
        )
    releases = f"vllm {installed_vllm()}", f"lmcache {installed_lmcache()}"
    return " ".join(("an object of LMCache's server", *releases, *processor))


class ObjectNames:
    """Turns keys into names with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # By model, rank and group of layers: the objects of a key without a layout.
        self._kinds: dict[tuple[str, int, int], tuple[str, int]] = {}

    def of_object(self, key: Any, memory_obj: Any) -> bytes:
        """Return the name of an object."""
        return self._name(key, _kind(*_tensors(memory_obj)), memory_obj.get_size())

    def of_key(self, key: Any, layout: Any | None) -> tuple[bytes, int] | None:
        """Return the name of a key and the length of its value.

        Args:
            key: LMCache's.
            layout: LMCache's description of the object; without one, what this process last stored
                or asked for is taken.

        Returns:
            None where nothing is known of such objects.
        """
        if layout is not None:
            size = sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
            )
            return self._name(key, _kind(layout.shapes, layout.dtypes), size), HEADER_BYTES + size
        if (known := self._kinds.get(group_of(key))) is None:
            return None
        kind, size = known
        return self._name(key, kind, size), HEADER_BYTES + size

    def _name(self, key: Any, kind: str, size: int) -> bytes:
        self._kinds[group_of(key)] = kind, size
        # No part but the last can have an @ (LMCache refuses it).
        parts = (
            key.model_name, f"{key.kv_rank:x}", str(key.object_group_id), kind,
            key.chunk_hash.hex(), key.cache_salt,
        )  # fmt: skip
        return (self._prefix + "@".join(parts)).encode()


def header_of(memory_obj: Any, name: bytes, codec: Codec) -> Header:
    """Return the header of an object's value."""
    shapes, dtypes = _tensors(memory_obj)
    one = len(shapes) == 1
    return Header(
        dtype=_dtype(dtypes[0]) if one else _SEVERAL,
        shape=tuple(shapes[0]) if one else (len(shapes),),
        memory_format=memory_obj.get_memory_format().value,
        payload_bytes=memory_obj.get_size(),
        layout=codec.layout,
        key=digest(name),
    )


def _tensors(memory_obj: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shapes and data types of what an object holds."""
    facts = memory_obj.metadata
    if facts.shapes is None:
        return [facts.shape], [facts.dtype]
    return facts.shapes, facts.dtypes


def group_of(key: Any) -> tuple[str, int, int]:
    """Return what tells rows of objects apart: model, rank and group of layers."""
    return key.model_name, key.kv_rank, key.object_group_id


def _kind(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    parts = zip(shapes, dtypes, strict=True)
    return ",".join(f"{_dtype(dtype)}:{'x'.join(map(str, shape))}" for shape, dtype in parts)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
