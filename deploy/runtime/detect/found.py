"""What a probe found: GPUs, lines that say what it looked at, and GPUs without a driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.planning.inventory import Gpu, GpuVendor
from deploy.runtime.host import text_of

_DEVICES = Path("sys/bus/pci/devices")
# Maker, and the beginnings of the classes that its GPUs for computing have. AMD's for a screen, the
# graphics units of processors among them, are left out.
_KINDS: dict[GpuVendor, tuple[str, tuple[str, ...]]] = {
    "cuda": ("0x10de", ("0x03",)),
    "rocm": ("0x1002", ("0x0380", "0x12")),
}


@dataclass(frozen=True)
class Found:
    """The GPUs of one vendor, in the order of their indices.

    Attributes:
        seen: one plain line for each thing that was looked at or left out.
        groups: numbers of the groups that own the device files; ROCm only.
        unusable: there are GPUs or a driver, and no GPU that can be used.
    """

    gpus: tuple[Gpu, ...] = ()
    seen: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    unusable: bool = False


_TIMES = "\N{MULTIPLICATION SIGN}"


def counted(devices: Iterable[tuple[str, int]]) -> str:
    """Return '4 x NVIDIA H100 80GB HBM3, 81559 MiB' from (name, MiB) pairs; kinds by ';'.

    A memory of 0 is unknown, and not shown.
    """
    kinds = Counter(f"{name}, {mib} MiB" if mib else name for name, mib in devices)
    return "; ".join(f"{count} {_TIMES} {kind}" for kind, count in kinds.items())


def hides_all(setting: str) -> bool:
    """Tell whether a `*_VISIBLE_DEVICES` is meant to hide every GPU."""
    return setting.strip().lower() in ("", "-1", "none", "void", "nodevfiles")


def visible_positions(setting: str, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the positions that a `*_VISIBLE_DEVICES` names, counted from 0, in ascending order.

    It lists positions or UUIDs; of a UUID its beginning is enough. As for the drivers, whatever
    follows an entry that is no device does not count: so "", "-1" and "NoDevFiles" mean none.
    """
    named: set[int] = set()
    for entry in setting.split(","):
        position = _position(entry.strip(), uuids)
        if position is None:
            break
        named.add(position)
    return tuple(sorted(named))


def _position(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.lower().startswith("gpu-"):
        return None
    matches = [place for place, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def without_driver(vendor: GpuVendor, root: Path) -> tuple[str, ...]:
    """Return a line on the GPUs of a vendor that the PCI bus has; none if it has none."""
    maker, classes = _KINDS[vendor]
    count = sum(
        text_of(device / "vendor").strip() == maker
        and text_of(device / "class").startswith(classes)
        for device in (root / _DEVICES).glob("*")
    )
    name = f"{'NVIDIA' if vendor == 'cuda' else 'AMD'} GPU{'s' if count > 1 else ''}"
    return (f"PCI bus: {count} {name}, and no driver that works",) if count else ()
