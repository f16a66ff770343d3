"""AMD GPUs: the list from the kernel's compute driver (KFD), names and memory from AMD's tools.

ROCm's runtime reads the same list in /sys: its order is the order of HIP's indices, and its memory
is what HIP can have, which for a partition of a GPU is a part of the GPU's. The format is in Linux,
drivers/gpu/drm/amd/amdkfd/kfd_topology.c.

Both tools have changed their JSON: amd-smi's list is bare, or under 'gpu_data' since ROCm 7; a size
is a number, or an object of value and unit; and rocm-smi has 'Card series' before, 'Card Series'
from ROCm 6 on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.found import Found, counted, hides_all, visible_positions, without_driver
from deploy.runtime.detect.tool import Tools, first_line
from deploy.runtime.host import text_of

# Less than a GPU for serving has, more than the graphics unit of a processor.
SMALL_MIB = 8 * 1024
_HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

_NODES = Path("sys/class/kfd/kfd/topology/nodes")
_DEVICE = Path("dev/kfd")
# Memory on the GPU itself, in reach of the CPU or not; 0 would be the host's.
_OWN_HEAPS = (1, 2)
AMD_SMI = ("amd-smi", "static", "--asic", "--bus", "--vram", "--board", "--json")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json")

_MIB_PER_UNIT = {"KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024.0}
# What a tool prints for an unknown model.
_NAMELESS = ("", "n/a", "amd radeon graphics", "amd instinct", "unknown")


def find_amd(tools: Tools, root: Path = Path("/")) -> Found:
    """Return the AMD GPUs that this machine offers to this user; asks no tool if there are none."""
    listed = read_kfd(root)
    if not device_present(root):
        there = without_driver("rocm", root)
        return Found(seen=("/dev/kfd does not exist", *there), unusable=bool(there))
    if not listed:
        return Found(seen=("/dev/kfd: exists, but has no GPU that ROCm can use",), unusable=True)
    cards, tool_lines = _ask(tools)
    gpus = tuple(
        _gpu(index, gpu, matching(gpu, index, cards, len(listed)), product_name(gpu, root))
        for index, gpu in enumerate(listed)
    )
    kept, left_out = without_small(gpus)
    whole = kept
    kept, hidden = _visible(kept, listed, tools.environ)
    meant = whole and any(hides_all(tools.environ.get(name, "0")) for name in _HIDING)
    groups = device_groups([gpu.render_node for gpu in kept], root) if kept else ()
    seen = (*_kfd_lines(listed, gpus, root), *tool_lines, *left_out, *hidden)
    return Found(kept, seen, groups, unusable=not kept and not meant)


def _ask(tools: Tools) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """Return the GPUs by the first tool that answers, and a line for each tool."""
    lines: list[str] = []
    for (name, *arguments), parse in ((AMD_SMI, parse_amd_smi), (ROCM_SMI, parse_rocm_smi)):
        answer = tools.ask(name, *arguments)
        # A tool may print everything and still end with an error, for one value it could not read.
        cards = parse(answer.stdout)
        if cards:
            kinds = counted(
                (card.name or "a GPU without a name", card.memory_mib) for card in cards
            )
            return cards, (*lines, f"{name}: {kinds}")
        said = first_line(answer.stdout) or "no output"
        lines.append(f"{name}: {answer.problem or f'no GPU in its output: {said}'}")
    return (), tuple(lines)


def matching(gpu: KfdGpu, index: int, cards: Sequence[Card], count: int) -> Card | None:
    """Return a tool's entry for this GPU: by the kernel's number, or by PCI address.

    If the tool gives neither, its order is taken for the kernel's, provided that it lists as many.
    """
    by_node = [card for card in cards if card.node == gpu.node]
    # Tools count partitions in the last digit of the address, where the kernel has a 0.
    by_pci = [card for card in cards if card.pci[:-1] == gpu.pci[:-1] and card.pci]
    exact = [card for card in by_pci if card.pci == gpu.pci]
    for found in (by_node, exact, by_pci):
        if found:
            return found[0]
    unplaced = len(cards) == count and not any(card.pci or card.node for card in cards)
    return cards[index] if unplaced else None


def _gpu(index: int, gpu: KfdGpu, card: Card | None, product: str) -> Gpu:
    name = (card.name if card else "") or product or f"AMD {gpu.arch}"
    memory_mib = gpu.memory_mib or (card.memory_mib if card else 0)
    return Gpu(index, "rocm", name, memory_mib, render_node=gpu.render_node, arch=gpu.arch)


def without_small(gpus: Sequence[Gpu]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Leave out the graphics units of processors, with a line for each one left out.

    Small GPUs stay if there are no others. A GPU of unknown memory is left out.
    """
    known = [gpu for gpu in gpus if gpu.memory_mib]
    large = [gpu for gpu in known if gpu.memory_mib >= SMALL_MIB]
    kept = tuple(large or known)
    reasons = (
        (gpu, f"it has only {gpu.memory_mib} MiB" if gpu.memory_mib else "its memory is unknown")
        for gpu in gpus
        if gpu not in kept
    )
    lines = (f"GPU {gpu.index}, {gpu.name}, is left out: {reason}" for gpu, reason in reasons)
    return kept, tuple(lines)


def _kfd_lines(listed: Sequence[KfdGpu], gpus: Sequence[Gpu], root: Path) -> tuple[str, ...]:
    kinds = counted((gpu.arch or "GPU", gpu.memory_mib) for gpu in gpus)
    lines = [f"/dev/kfd: {kinds}"]
    cards = len({gpu.pci for gpu in listed})
    if cards < len(listed):
        whole = "1 GPU" if cards == 1 else f"{cards} GPUs"
        lines.append(f"/dev/kfd: these are {len(listed)} partitions of {whole}")
    if not may_open(root):
        lines.append(
            "/dev/kfd: this user may not open it; add the user to the groups render and video"
        )
    return tuple(lines)


def _visible(
    gpus: tuple[Gpu, ...], listed: Sequence[KfdGpu], environ: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that the environment leaves visible; HIP's variable counts in ROCR's list."""
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    indices = list(range(len(listed)))
    lines: list[str] = []
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        setting = environ.get(variable)
        if setting is None:
            continue
        places = visible_positions(setting, [listed[index].uuid for index in indices])
        indices = [indices[place] for place in places]
        left = sum(gpu.index in indices for gpu in gpus)
        lines.append(f"{variable}={setting}: leaves {left} of {len(gpus)} AMD GPUs")
    return tuple(gpu for gpu in gpus if gpu.index in indices), tuple(lines)


@dataclass(frozen=True)
class KfdGpu:
    """A GPU, or a partition of one.

    Attributes:
        node: its number in the kernel's list, which also counts processors.
        memory_mib: 0 if the kernel names none.
        pci: '0000:c1:00.0'; partitions of a GPU share it.
        uuid: 'GPU-…', as ROCR_VISIBLE_DEVICES takes it; "" if the GPU has none.
    """

    node: int
    arch: str
    memory_mib: int
    render_node: str
    pci: str
    uuid: str


def parse_properties(text: str) -> dict[str, int]:
    """Return the numbers of a `properties` file: a name and a decimal number on each line."""
    pairs = (line.split() for line in text.splitlines())
    return {
        pair[0]: int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[1].isascii() and pair[1].isdigit()
    }


def gfx_target(version: int) -> str:
    """Return 'gfx90a' for 90010: two decimal digits each for minor and stepping, printed in hex."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}" if major else ""


def kfd_gpu(node: int, properties: dict[str, int], bank_bytes: int) -> KfdGpu | None:
    """Return the GPU of a node, or None if the node is a processor."""
    if not properties.get("simd_count"):
        return None
    minor = properties.get("drm_render_minor", 0)
    unique = properties.get("unique_id", 0)
    return KfdGpu(
        node=node,
        arch=gfx_target(properties.get("gfx_target_version", 0)),
        memory_mib=bank_bytes // 2**20,
        render_node=f"/dev/dri/renderD{minor}" if minor else "",
        pci=_pci(properties.get("domain", 0), properties.get("location_id", 0)),
        uuid=f"GPU-{unique:016x}" if unique else "",
    )


def _pci(domain: int, location: int) -> str:
    """Return a PCI address; the bits above its 16 hold the number of a partition."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def own_bytes(banks: Iterable[str]) -> int:
    """Return the bytes of memory on the GPU itself, from its banks' `properties` files."""
    parsed = [parse_properties(text) for text in banks]
    return sum(
        bank.get("size_in_bytes", 0) for bank in parsed if bank.get("heap_type") in _OWN_HEAPS
    )


def read_kfd(root: Path = Path("/")) -> tuple[KfdGpu, ...]:
    """Return the GPUs that ROCm can open here, in its order; none where there is no driver.

    A GPU that was not given to this container has no render node in it, or cannot be read.
    """
    try:
        nodes = sorted((root / _NODES).iterdir(), key=lambda path: _number(path.name))
    except OSError:
        return ()
    found = (_read_node(node) for node in nodes)
    return tuple(
        gpu for gpu in found if gpu and gpu.render_node and _below(root, gpu.render_node).exists()
    )


def _read_node(node: Path) -> KfdGpu | None:
    properties = parse_properties(text_of(node / "properties"))
    banks = [text_of(bank) for bank in sorted(node.glob("mem_banks/*/properties"))]
    return kfd_gpu(_number(node.name), properties, own_bytes(banks))


def device_present(root: Path = Path("/")) -> bool:
    """Return whether /dev/kfd is there: without it, ROCm has no GPU."""
    return (root / _DEVICE).exists()


def device_groups(render_nodes: Iterable[str], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the numbers of the groups that own /dev/kfd and these render nodes, in order.

    Root's own is left out unless it is the only one: a container's user needs no group for it.
    """
    groups: set[int] = set()
    for path in (root / _DEVICE, *(_below(root, node) for node in render_nodes)):
        try:
            groups.add(path.stat().st_gid)
        except OSError:
            continue
    return tuple(sorted(groups - {0} or groups))


def may_open(root: Path = Path("/")) -> bool:
    """Return whether this user may open /dev/kfd."""
    return os.access(root / _DEVICE, os.R_OK | os.W_OK)


def product_name(gpu: KfdGpu, root: Path = Path("/")) -> str:
    """Return the name that a server GPU carries itself, or ""."""
    card = root / "sys/class/drm" / Path(gpu.render_node).name / "device"
    return text_of(card / "product_name").strip()


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() else -1


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
