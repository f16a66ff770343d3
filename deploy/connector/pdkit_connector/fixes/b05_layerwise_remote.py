"""B5: a single layer's object, of three dimensions, cannot be put into a remote store."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdkit_connector.layer_steps import replace_method, silent
from pdkit_connector.registry import Fix, Need, ProbeResult, describe
from pdkit_connector.setting import Setting

_MODULE = "lmcache.v1.protocol"
_DIMENSIONS = 4
_PROBE_SHAPE = (4, 2, 16)


def probe(_setting: Setting) -> ProbeResult:
    """Pack the metadata of a single layer and read it back."""
    import torch
    from lmcache.v1 import protocol
    from lmcache.v1.memory_management import MemoryFormat

    shape, dtype = torch.Size(_PROBE_SHAPE), torch.bfloat16
    grouped = hasattr(protocol, "init_remote_metadata_info")
    before = {name: value for name, value in vars(protocol).items() if name.startswith("REMOTE_")}
    try:
        if grouped:
            with silent(_MODULE):
                protocol.init_remote_metadata_info(1)
        told = ([shape], [dtype]) if grouped else (shape, dtype)
        whole = protocol.RemoteMetadata(shape.numel() * 2, *told, MemoryFormat.KV_T2D)
        into = bytearray(64)
        whole.serialize_into(into)
        packed = whole.serialize()
        read = protocol.RemoteMetadata.deserialize(packed)
    except (AssertionError, struct.error) as exc:
        return ProbeResult(Need.NEEDED, f"shape {_PROBE_SHAPE}: {describe(exc)}")
    finally:
        vars(protocol).update(before)
    if read != whole or not into.startswith(packed):
        return ProbeResult(Need.NEEDED, f"shape {_PROBE_SHAPE} is read back as {read}")
    return ProbeResult(Need.NOT_NEEDED, f"shape {_PROBE_SHAPE} is packed and read back")


def apply(_setting: Setting) -> str:
    """Pack a shorter shape with zeros behind it, and drop those on reading."""
    from lmcache.v1.protocol import RemoteMetadata

    replace_method(RemoteMetadata, "serialize", _padded)
    replace_method(RemoteMetadata, "serialize_into", _padded)
    replace_method(RemoteMetadata, "deserialize", _stripped)
    return "shapes are packed with zeros up to four dimensions"


def _padded(pack: Callable[..., Any], self: Any, *args: Any) -> Any:
    if (shapes := getattr(self, "shapes", None)) is None:
        if len(self.shape) < _DIMENSIONS:
            self = replace(self, shape=_four(self.shape))
    elif any(len(shape) < _DIMENSIONS for shape in shapes):
        self = replace(self, shapes=[_four(shape) for shape in shapes])
    return pack(self, *args)


def _four(shape: Any) -> Any:
    import torch

    return torch.Size((*shape, *(0,) * (_DIMENSIONS - len(shape))))


def _stripped(unpack: Callable[[Any], Any], packed: Any) -> Any:
    from lmcache.v1.memory_management import MemoryFormat

    metadata = unpack(packed)
    # The shape of bytes is their count and three zeros, which belong to it.
    if metadata.fmt in (MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER):
        return metadata
    if hasattr(metadata, "shapes"):
        metadata.shapes = [_shortest(shape) for shape in metadata.shapes]
    else:
        metadata.shape = _shortest(metadata.shape)
    return metadata


def _shortest(shape: Any) -> Any:
    import torch

    kept = len(shape)
    while kept > 1 and shape[kept - 1] == 0:
        kept -= 1
    return shape if kept == len(shape) else torch.Size(shape[:kept])


FIX = Fix(
    id="B5",
    title="layerwise KV never reaches the remote store",
    link="https://github.com/LMCache/LMCache/issues/2752",
    reason=(
        "The metadata stored with an object takes shapes of four dimensions only, and a single "
        "layer has three: with use_layerwise every put fails and nothing is ever shared."
    ),
    probe=probe,
    apply=apply,
)
