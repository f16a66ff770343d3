"""Machines that are not there: tools on a PATH of their own, and /sys and /dev below a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.planning.inventory import Inventory
from deploy.runtime.detect import detect_inventory
from deploy.runtime.detect.tool import Tools

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "detect"
BUSES = (0x05, 0x26, 0x46, 0x65, 0x85, 0xA6, 0xC6, 0xE5)


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text(encoding="utf-8")


@dataclass
class Machine:
    """A machine in a folder: what its tools print, and the GPUs that its kernel lists."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.root / "bin").mkdir(parents=True)
        self.environ["PATH"] = str(self.root / "bin")

    @property
    def tools(self) -> Tools:
        return Tools(self.environ, self.root, timeout_s=5)

    def install(self, name: str, script: str) -> None:
        """Put a tool on PATH, as a shell script; each use of it leaves its arguments in a file."""
        path = self.root / "bin" / name
        path.write_text(f'#!/bin/sh\necho "$@" >> "{self.root}/{name}.calls"\n{script}\n')
        path.chmod(0o755)

    def prints(self, name: str, text: str, *, code: int = 0, errors: str = "") -> None:
        """Install a tool that prints this."""
        (self.root / f"{name}.out").write_text(text)
        (self.root / f"{name}.err").write_text(errors)
        # No PATH of the real machine: the shell's own words only.
        self.install(
            name,
            f'while IFS= read -r line || [ -n "$line" ]; do printf "%s\\n" "$line"; done'
            f' < "{self.root}/{name}.out"\n'
            f'while IFS= read -r line; do printf "%s\\n" "$line" >&2; done'
            f' < "{self.root}/{name}.err"\nexit {code}',
        )

    def has_on_bus(self, maker: str, kind: str, *, count: int = 1) -> None:
        """Put devices of a maker and a class on the PCI bus, without a driver."""
        for at in range(count):
            device = self.root / f"sys/bus/pci/devices/0000:{at:02x}:00.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text(f"{maker}\n")
            (device / "class").write_text(f"{kind}\n")

    def calls(self, name: str) -> list[str]:
        path = self.root / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def kernel_lists(self, *kinds: tuple[str, int], processors: int = 2) -> None:
        """Make the kernel list processors, then GPUs: of which kind, and with how many MiB."""
        self._node(0, recorded("kfd/cpu.properties"), 0)
        for node in range(1, processors):
            self._node(node, recorded("kfd/cpu.properties"), 0)
        for at, (kind, memory_mib) in enumerate(kinds):
            text = recorded(f"kfd/{kind}.properties")
            values = {"location_id": BUSES[at % 8] << 8, "drm_render_minor": 128 + at}
            if kind != "igpu":
                values["unique_id"] = 0xA5D3_0000_0000_0000 + at
            self._node(processors + at, change(text, values), memory_mib)
            self.add_device(f"dri/renderD{128 + at}")
        self.add_device("kfd")

    def kernel_lists_partitions(self, count: int, memory_mib: int) -> None:
        """Make the kernel list one GPU that is cut into partitions."""
        for at in range(count):
            values = {
                "location_id": at << 28 | BUSES[0] << 8,
                "drm_render_minor": 128 + at,
                "unique_id": 0xA5D3_0000_0000_0000,
            }
            text = change(recorded("kfd/mi300x_cpx.properties"), values)
            self._node(2 + at, text, memory_mib)
            self.add_device(f"dri/renderD{128 + at}")
        self.add_device("kfd")

    def _node(self, number: int, properties: str, memory_mib: int) -> None:
        node = self.root / "sys/class/kfd/kfd/topology/nodes" / str(number)
        bank = node / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (node / "properties").write_text(properties)
        heap = {"size_in_bytes": memory_mib * 2**20, "heap_type": 1 if memory_mib else 0}
        (bank / "properties").write_text(change(recorded("kfd/bank.properties"), heap))

    def add_device(self, name: str) -> None:
        path = self.root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def detect(self, info: dict[str, object] | None = None, timeout_s: float = 5) -> Inventory:
        return detect_inventory(info, environ=self.environ, root=self.root, timeout_s=timeout_s)


def change(properties: str, values: dict[str, int]) -> str:
    """Return a `properties` file with other numbers."""
    lines = (line.split() for line in properties.splitlines())
    return "".join(f"{name} {values.get(name, number)}\n" for name, number in lines)


def about(seen: Sequence[str], word: str) -> str:
    """Return the only line that has this word."""
    lines = [line for line in seen if word in line]
    assert len(lines) == 1, seen
    return lines[0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with no GPU and no tool."""
    return Machine(tmp_path / "machine")
