"""What the vendor's tools print here, kept as fixtures for the tests of the kit's detection."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from deploy.planning.inventory import Inventory
from deploy.runtime.detect import detect_inventory
from deploy.runtime.detect.amd import AMD_SMI, ROCM_SMI
from deploy.runtime.detect.nvidia import FIELDS, query
from deploy.runtime.detect.tool import Tools

# Fixture → the command; what is not installed is left out.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "nvidia/{name}.csv": ("nvidia-smi", *query(FIELDS)),
    "amd/{name}.amd-smi.json": AMD_SMI,
    "amd/{name}.rocm-smi.json": ROCM_SMI,
}
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_SERIAL = re.compile(r'("[^"]*(?:serial|unique)[^"]*": )"[^"]*"', re.IGNORECASE)


def short_name(inventory: Inventory, vendor: str) -> str:
    """Return a name for files, such as 'nvidia-h100-80gb-hbm3-x2'; 'cpu' where there is no GPU."""
    gpus = inventory.gpus_of(vendor)
    if not gpus:
        return vendor
    words = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    return words if len(gpus) == 1 else f"{words}-x{len(gpus)}"


def record(folder: Path, name: str, tools: Tools | None = None, kfd: Path = _KFD) -> list[str]:
    """Write the fixtures, without the numbers of these very GPUs; return their names."""
    tools = tools or Tools(os.environ)
    found: dict[str, str] = {}
    for fixture, (command, *arguments) in TOOLS.items():
        answer = tools.ask(command, *arguments)
        if answer.stdout.strip():
            found[fixture.format(name=name)] = answer.stdout
    for node in sorted(kfd.glob("*/properties")):
        found[f"kfd/{name}.{node.parent.name}.properties"] = node.read_text(encoding="utf-8")
    for fixture, text in found.items():
        (folder / fixture).parent.mkdir(parents=True, exist_ok=True)
        (folder / fixture).write_text(without_serials(text), encoding="utf-8")
    return sorted(found)


def without_serials(text: str) -> str:
    """Return a tool's output in which no GPU can be told from another of its kind."""
    seen: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], str(uuid.UUID(int=len(seen) + 1)))

    text = re.sub(r"(?m)^unique_id \d+$", "unique_id 1", text)
    return _SERIAL.sub(r'\1"0x1"', _UUID.sub(other, text))


def inventory() -> Inventory:
    return detect_inventory()
