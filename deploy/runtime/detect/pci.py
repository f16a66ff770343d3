"""GPUs on the PCI bus, which the kernel lists in /sys also where no driver works."""

from __future__ import annotations

from pathlib import Path

from deploy.planning.inventory import GpuVendor
from deploy.runtime.host import text_of

_DEVICES = Path("sys/bus/pci/devices")
# Maker, and the beginnings of the classes that its GPUs for computing have. AMD's for a screen, the
# graphics units of processors among them, are left out.
_KINDS: dict[GpuVendor, tuple[str, tuple[str, ...]]] = {
    "cuda": ("0x10de", ("0x03",)),
    "rocm": ("0x1002", ("0x0380", "0x12")),
}


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
