"""AMD GPUs: the list from the kernel, names and memory from the vendor's tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.amd_tools import AMD_SMI, ROCM_SMI, Card, parse_amd_smi, parse_rocm_smi
from deploy.runtime.detect.found import Found, counted, hides_all, visible_positions
from deploy.runtime.detect.kfd import (
    KfdGpu,
    device_groups,
    device_present,
    may_open,
    product_name,
    read_kfd,
)
from deploy.runtime.detect.pci import without_driver
from deploy.runtime.detect.tool import Tools, first_line

# Less than a GPU for serving has, more than the graphics unit of a processor.
SMALL_MIB = 8 * 1024
_HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

_TOOLS: tuple[tuple[tuple[str, ...], Callable[[str], tuple[Card, ...]]], ...] = (
    (AMD_SMI, parse_amd_smi),
    (ROCM_SMI, parse_rocm_smi),
)


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
    """Return what the first tool that answers says of the GPUs, and a line for each one asked."""
    lines: list[str] = []
    for (name, *arguments), parse in _TOOLS:
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
    """Return what a tool said of this GPU: by the kernel's number, else by PCI address.

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
    """Return what the user's environment leaves; HIP counts in what ROCR's variable left."""
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
