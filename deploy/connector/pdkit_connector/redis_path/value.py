"""The format of a value in Redis: a header of fixed size, then a chunk's bytes.

A value is used only if its header fits the reader and its checksum matches. So corrupt, truncated,
foreign and misplaced values are misses. With a secret the checksum is a MAC, and forged values are
misses, too.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdkit_connector.errors import ConnectorError
from pdkit_connector.releases import installed_lmcache, installed_vllm

Buffer = bytes | bytearray | memoryview

_MAGIC = b"pdkitKV\0"
_FORMAT = 1
_MAX_DIMS = 6
# magic, format, checksum's algorithm, memory format, dimensions, dtype, shape, payload's bytes,
# layout, key, checksum of all, checksum of the header; padded, so that payloads start at a round
# offset.
_DTYPE_BYTES = 16
_LAYOUT = struct.Struct(f"<8sHBBB3x{_DTYPE_BYTES}s{_MAX_DIMS}IQ16s16s8s8s16x")
HEADER_BYTES = _LAYOUT.size
_CHECKSUM = slice(HEADER_BYTES - 32, HEADER_BYTES - 24)
_OF_HEADER = slice(HEADER_BYTES - 24, HEADER_BYTES - 16)


class BadValue(ValueError):
    """A value is not what its reader asked for; `kind` is the counter that counts it."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Header:
    """The description of a payload.

    Attributes:
        dtype: name of the elements' type, such as bfloat16.
        shape: of the tensor; at most 6 dimensions.
        memory_format: LMCache's number for the order of the dimensions.
        payload_bytes: number of bytes after the header.
        layout: digest of everything that the bytes' meaning depends on (`digest`).
        key: digest of the key that the value was stored under.
    """

    dtype: str
    shape: tuple[int, ...]
    memory_format: int
    payload_bytes: int
    layout: bytes
    key: bytes


def digest(text: Buffer) -> bytes:
    """Return the 16-byte digest of a text, such as a key."""
    return hashlib.blake2b(text, digest_size=16).digest()


class Codec:
    """Makes and checks values of one layout."""

    def __init__(self, layout: str, algorithm: str | None = None, secret: bytes = b"") -> None:
        """Use the fastest checksum here, or the one that is named.

        With a secret, it is a MAC, and the layout differs for each secret, so that values of an old
        secret are never found, instead of found and refused.

        Raises ConnectorError if Python has no library for a checksum.
        """
        of_secret = _derived(secret, b"pdkit name").hex() if secret else ""
        self.layout = digest((layout + of_secret).encode())
        self._checksums = _macs(_derived(secret, b"pdkit value")) if secret else _checksums()
        names = {name: number for number, (name, _) in self._checksums.items()}
        if not names or (algorithm and algorithm not in names):
            raise ConnectorError(
                f"no checksum {algorithm or 'xxh3 or blake3'} in this Python; "
                "install xxhash (pip install xxhash)"
            )
        self._number = names[algorithm] if algorithm else min(self._checksums)

    @property
    def algorithm(self) -> str:
        """Name of the checksum that new values get."""
        return self._checksums[self._number][0]

    def header(self, header: Header, payload: Buffer) -> bytes:
        """Return the header for `payload`; raise BadValue if a header cannot describe it."""
        dtype = header.dtype.encode()
        if header.payload_bytes != len(payload):
            raise BadValue("unfit", f"{len(payload)} bytes are not {header.payload_bytes}")
        if len(header.shape) > _MAX_DIMS or len(dtype) > _DTYPE_BYTES:
            raise BadValue("unfit", f"{header.shape} of {header.dtype} does not fit into a header")
        fixed = bytearray(
            _LAYOUT.pack(
                _MAGIC,
                _FORMAT,
                self._number,
                header.memory_format,
                len(header.shape),
                dtype,
                *header.shape,
                *(0,) * (_MAX_DIMS - len(header.shape)),
                header.payload_bytes,
                header.layout,
                header.key,
                bytes(8),
                bytes(8),
            )
        )
        checksum = self._checksums[self._number][1]
        of_all = checksum(fixed)
        of_all.update(payload)
        fixed[_CHECKSUM] = of_all.digest()[:8]
        fixed[_OF_HEADER] = checksum(fixed).digest()[:8]
        return bytes(fixed)

    def parse(self, raw: bytes, key: bytes) -> tuple[Header, PayloadChecksum]:
        """Return a value's header, and the checksum of its payload.

        Args:
            raw: the first HEADER_BYTES of the value.
            key: the key that was asked for.

        Raises:
            BadValue: the header is damaged, of another layout or another key's.
        """
        magic, version, number, memory_format, ndim, dtype, *rest = _LAYOUT.unpack(raw)
        shape, (payload_bytes, layout, of_key, *_) = rest[:_MAX_DIMS], rest[_MAX_DIMS:]
        if magic != _MAGIC or version != _FORMAT:
            raise BadValue("foreign", "its format is unknown to this version")
        if number not in self._checksums:
            raise BadValue("foreign", f"its checksum {number} cannot be computed here")
        check = self._check(number, raw)
        if layout != self.layout:
            raise BadValue("foreign", "it was stored for another layout")
        if of_key != digest(key):
            raise BadValue("foreign", "it was stored under another key")
        if ndim > _MAX_DIMS:
            raise BadValue("corrupt", f"it has {ndim} dimensions")
        name = dtype.rstrip(b"\0").decode("ascii", "replace")
        header = Header(name, tuple(shape[:ndim]), memory_format, payload_bytes, layout, of_key)
        return header, check

    def _check(self, number: int, raw: bytes) -> PayloadChecksum:
        """Check a header; return the checksum of its payload.

        The header has its own checksum, because memory is reserved by it.
        """
        checksum = self._checksums[number][1]
        fixed = bytearray(raw)
        fixed[_OF_HEADER] = bytes(8)
        if checksum(fixed).digest()[:8] != raw[_OF_HEADER]:
            raise BadValue("corrupt", "the checksum of its header does not match")
        fixed[_CHECKSUM] = bytes(8)
        return PayloadChecksum(checksum(fixed), raw[_CHECKSUM])


def object_layout() -> str:
    """Name what the bytes of an object depend on and its key does not say.

    They are an engine's blocks as they are. On CPUs vLLM lays them out by instruction set, and
    neither vLLM nor LMCache is held to keep a layout from one release to the next. Beside GPUs, the
    processor does not matter: hosts with others share KV.
    """
    import torch

    processor: tuple[str, ...] = ()
    if torch.version.cuda is None and torch.version.hip is None:
        processor = (
            platform.machine(),
            f"avx512={torch.cpu._is_avx512_supported()}",
            f"amx={torch.cpu._is_amx_tile_supported()}",
        )
    releases = f"vllm {installed_vllm()}", f"lmcache {installed_lmcache()}"
    return " ".join(("an object of LMCache's server", *releases, *processor))


class PayloadChecksum:
    """The checksum of a payload that comes in pieces."""

    def __init__(self, running: Any, expected: bytes) -> None:
        self._running = running
        self._expected = expected

    def update(self, piece: Buffer) -> None:
        """Add the next bytes of the payload."""
        self._running.update(piece)

    def require(self) -> None:
        """Raise BadValue unless the payload is the one that was stored."""
        if self._running.digest()[:8] != self._expected:
            raise BadValue("corrupt", "its checksum does not match")


def _derived(secret: bytes, purpose: bytes) -> bytes:
    key = hashlib.sha512(secret).digest()
    return hashlib.blake2b(key=key, person=purpose, digest_size=32).digest()


def _macs(key: bytes) -> dict[int, tuple[str, Callable[[Buffer], Any]]]:
    """Return the MACs of this Python, as `_checksums` does; blake3 takes a sixth of the time."""
    found: dict[int, tuple[str, Callable[[Buffer], Any]]] = {
        4: ("blake2b-mac", partial(hashlib.blake2b, key=key, digest_size=8))
    }
    try:
        from blake3 import blake3

        found[3] = ("blake3-mac", partial(blake3, key=key))
    except ImportError:
        pass
    return found


def _checksums() -> dict[int, tuple[str, Callable[[Buffer], Any]]]:
    """Return the checksums of this Python by the number that stands in headers, fastest first."""
    found: dict[int, tuple[str, Callable[[Buffer], Any]]] = {}
    try:
        from xxhash import xxh3_64  # the oldest ones have none

        found[1] = ("xxh3", xxh3_64)
    except ImportError:
        pass
    try:
        # vLLM depends on it.
        from blake3 import blake3

        found[2] = ("blake3", blake3)
    except ImportError:
        pass
    return found
