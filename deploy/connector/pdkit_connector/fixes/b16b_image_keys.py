"""B16b: only 16 bits of an image's hash are in its key, so that images share KV."""

from __future__ import annotations

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe

_PLACEHOLDERS = 4


def probe(_setting: Setting) -> ProbeResult:
    """Fill the placeholders of two images whose hashes end alike, and of one without a hash."""
    from lmcache.integration.vllm import vllm_v1_adapter as adapter

    try:
        values = [
            _filled(adapter.apply_mm_hashes_to_token_ids, identifier)
            for identifier in ("a0001", "b0001", "an image")
        ]
    except ValueError as exc:
        return ProbeResult(
            Need.NEEDED, f"an identifier that is not a number raises {describe(exc)}"
        )
    if values[0] == values[1]:
        return ProbeResult(Need.NEEDED, "images whose hashes end in the same 16 bits have one key")
    return ProbeResult(Need.NOT_NEEDED, "the key of an image depends on all of its identifier")


def apply(_setting: Setting) -> str:
    """Fill placeholders with 31 bits each of a digest of the whole identifier."""
    from lmcache.integration.vllm import utils
    from lmcache.integration.vllm import vllm_v1_adapter as adapter

    for module in (utils, adapter):
        vars(module)["apply_mm_hashes_to_token_ids"] = _fill
    return "placeholders carry a digest of the whole identifier"


def _fill(token_ids: Any, mm_hashes: list[str], mm_positions: list[Any]) -> Any:
    """Overwrite the placeholders in `token_ids`, a prompt or the beginning of one, and return it.

    What stands at a position depends on the image and the place in it only, so that a longer
    beginning of a prompt keeps the keys of a shorter one.
    """
    import torch

    for identifier, place in zip(mm_hashes, mm_positions, strict=True):
        count = min(place.length, len(token_ids) - place.offset)
        if count <= 0:
            continue
        digest = hashlib.shake_256(str(identifier).encode()).digest(4 * count)
        values = [value & 0x7FFFFFFF for value in struct.unpack(f">{count}I", digest)]
        token_ids[place.offset : place.offset + count] = torch.tensor(values, dtype=token_ids.dtype)
    return token_ids


def _filled(fill: Any, identifier: str) -> list[int]:
    import torch

    tokens = torch.zeros(_PLACEHOLDERS, dtype=torch.long)
    place = SimpleNamespace(offset=0, length=_PLACEHOLDERS)
    filled: list[int] = fill(tokens, [identifier], [place]).tolist()
    return filled


FIX = Fix(
    id="B16b",
    title="images share KV",
    link="none",
    reason=(
        "Up to 0.5.3 the placeholders of an image are filled with the last 16 bits of its hash, so "
        "in the same prompt, one in 65536 pairs of images has the same key, and the second image "
        "is answered with the KV of the first. In the first releases, an identifier that is not a "
        "hexadecimal number ends the engine's core."
    ),
    probe=probe,
    apply=apply,
)
