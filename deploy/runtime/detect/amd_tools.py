"""Names and memory of AMD GPUs, as `amd-smi` and `rocm-smi` print them in JSON.

Both have changed their format: amd-smi's list is bare, or under 'gpu_data' since ROCm 7; a size is
a number, or an object of value and unit; and rocm-smi has 'Card series' before, 'Card Series' from
ROCm 6 on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AMD_SMI = ("amd-smi", "static", "--asic", "--bus", "--vram", "--board", "--json")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json")

_MIB_PER_UNIT = {"KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024.0}
# What a tool prints for an unknown model.
_NAMELESS = ("", "n/a", "amd radeon graphics", "amd instinct", "unknown")


@dataclass(frozen=True)
class Card:
    """What a tool says of a GPU.

    Attributes:
        name: "" if the tool does not know the model.
        memory_mib: of the whole GPU, also where it is partitioned; 0 if unknown.
        node: its number in the kernel's list; None if unknown.
    """

    name: str
    memory_mib: int
    pci: str = ""
    node: int | None = None


def json_in(text: str) -> object:
    """Return the JSON object or list in a tool's output, or None: warnings may stand before it.

    It must begin at the start of a line, so that a fragment of truncated output is not taken for
    the whole.
    """
    decoder = json.JSONDecoder()
    start = 0
    for line in text.splitlines(keepends=True):
        if line[:1] in ("{", "["):
            try:
                found: object = decoder.raw_decode(text, start)[0]
                return found
            except ValueError:
                pass
        start += len(line)
    return None


def parse_amd_smi(text: str) -> tuple[Card, ...]:
    """Return the cards of `amd-smi static --json`."""
    listed = json_in(text)
    if isinstance(listed, dict):
        listed = listed.get("gpu_data")
    if not isinstance(listed, list):
        return ()
    return tuple(_amd_smi_card(one) for one in listed if isinstance(one, dict) and "gpu" in one)


def _amd_smi_card(raw: Mapping[str, Any]) -> Card:
    names = (_part(raw, "asic").get("market_name"), _part(raw, "board").get("product_name"))
    return Card(
        name=_first_name(names),
        memory_mib=_mib(_part(raw, "vram")),
        pci=_text(_part(raw, "bus").get("bdf")).lower(),
    )


def _part(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section; the tool writes "N/A" where it has none."""
    part = raw.get(key)
    return part if isinstance(part, dict) else {}


def _mib(vram: Mapping[str, Any]) -> int:
    size: Any = vram.get("size", vram.get("size_mb"))
    if isinstance(size, dict):
        size = f"{size.get('value')} {size.get('unit', '')}"
    number, _, unit = _text(size).partition(" ")
    try:
        return int(float(number) * _MIB_PER_UNIT[unit.strip().upper() or "MB"])
    except (ValueError, OverflowError, KeyError):
        return 0


def parse_rocm_smi(text: str) -> tuple[Card, ...]:
    """Return the cards of `rocm-smi --json`."""
    raw = json_in(text)
    if not isinstance(raw, dict):
        return ()
    cards = {key: value for key, value in raw.items() if key.startswith("card")}
    ordered = sorted(cards, key=lambda key: (len(key), key))
    return tuple(_rocm_smi_card(cards[key]) for key in ordered if isinstance(cards[key], dict))


def _rocm_smi_card(raw: Mapping[str, Any]) -> Card:
    values = {key.lower(): _text(value) for key, value in raw.items()}
    size, node = values.get("vram total memory (b)", ""), values.get("node id", "")
    return Card(
        name=_first_name((values.get("card series"), values.get("card model"))),
        memory_mib=int(size) // 2**20 if size.isdigit() else 0,
        pci=values.get("pci bus", "").lower(),
        node=int(node) if node.isdigit() else None,
    )


def _first_name(names: Sequence[Any]) -> str:
    """Return the first value that is a model's name, not 'N/A' or a device number."""
    texts = [_text(name) for name in names]
    return next(
        (
            text
            for text in texts
            if text.lower() not in _NAMELESS and not text.lower().startswith("0x")
        ),
        "",
    )


def _text(value: Any) -> str:
    return str(value).strip() if isinstance(value, (str, int, float)) else ""
