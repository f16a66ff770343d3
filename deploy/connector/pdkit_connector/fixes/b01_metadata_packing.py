"""B1: an object with fewer records than the store's metadata has room for is never stored."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdkit_connector.in_engine.layer_steps import replace_method, silent
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe

_MODULE = "lmcache.v1.protocol"
_HEAD_INTS, _RECORD_INTS = 2, 5
_PROBE_LENGTH = 77


def probe(_setting: Setting) -> ProbeResult:
    """Pack LMCache's own object of compressed bytes for one group and for two."""
    from lmcache.v1 import protocol

    if not hasattr(protocol, "init_remote_metadata_info"):
        return ProbeResult(Need.NOT_NEEDED, "RemoteMetadata holds one shape and one dtype")
    before = protocol.REMOTE_METADATA_FMT, protocol.REMOTE_METADATA_BYTES
    try:
        for groups in (1, 2):
            if trouble := _trouble(protocol, groups):
                return ProbeResult(Need.NEEDED, f"metadata for {groups} groups: {trouble}")
    finally:
        protocol.REMOTE_METADATA_FMT, protocol.REMOTE_METADATA_BYTES = before
    return ProbeResult(Need.NOT_NEEDED, "compressed bytes pack for one group and for two")


def apply(_setting: Setting) -> str:
    """Fill a short list of records with empty ones on writing, and drop those on reading."""
    from lmcache.v1.protocol import RemoteMetadata

    replace_method(RemoteMetadata, "serialize", _filled)
    replace_method(RemoteMetadata, "serialize_into", _filled)
    replace_method(RemoteMetadata, "deserialize", _trimmed)
    return "missing records are packed as zeros and dropped again on reading"


def _filled(pack: Callable[..., Any], self: Any, *args: Any) -> Any:
    import torch

    groups = _groups()
    shapes, dtypes = len(self.shapes), len(self.dtypes)
    if not shapes == dtypes == groups and dtypes <= shapes <= groups:
        # A dtype that the object lacks is 0 in the store, never a guess: a reader that
        # trusted a guess would reshape bytes that are not a tensor.
        self = replace(
            self,
            shapes=[*self.shapes, *[torch.Size((0, 0, 0, 0))] * (groups - shapes)],
            dtypes=[*self.dtypes, *[None] * (groups - dtypes)],
        )
    return pack(self, *args)


def _trimmed(unpack: Callable[[Any], Any], packed: Any) -> Any:
    metadata = unpack(packed)
    while len(metadata.shapes) > 1 and metadata.dtypes[-1] is None:
        if any(metadata.shapes[-1]):
            break
        metadata.shapes.pop()
        metadata.dtypes.pop()
    return metadata


def _groups() -> int:
    """Count the records in the store's metadata."""
    from lmcache.v1 import protocol

    return (len(protocol.REMOTE_METADATA_FMT or "") - _HEAD_INTS) // _RECORD_INTS


def _trouble(protocol: Any, groups: int) -> str:
    """Return how packing compressed bytes goes wrong, or nothing."""
    from lmcache.v1.memory_management import BytesBufferMemoryObj

    with silent(_MODULE):
        protocol.init_remote_metadata_info(groups)
    obj = BytesBufferMemoryObj(bytes(_PROBE_LENGTH))
    whole = protocol.RemoteMetadata(
        _PROBE_LENGTH, obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()
    )
    into = bytearray(struct.calcsize("i") * (_HEAD_INTS + _RECORD_INTS * groups))
    try:
        packed = whole.serialize()
        whole.serialize_into(into)
        read = protocol.RemoteMetadata.deserialize(packed)
    except (ValueError, struct.error) as exc:
        return describe(exc)
    if (read.shapes, read.dtypes) != ([obj.get_shape()], [None]) or bytes(into) != packed:
        return f"read back as {len(read.shapes)} shapes, dtypes {read.dtypes}"
    return ""


FIX = Fix(
    id="B1",
    title="compressed or single-layer objects never reach the remote store",
    link="https://github.com/LMCache/LMCache/pull/2412",
    reason=(
        "The metadata stored with an object has one record of shape and dtype for each group of "
        "equal layers. An object with fewer dtypes than shapes (cachegen's) or fewer records than "
        "groups (cachegen's, a single layer's) cannot be packed, and the put ends in a warning."
    ),
    probe=probe,
    apply=apply,
)
