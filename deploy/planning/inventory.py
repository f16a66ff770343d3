"""What a machine has, as far as planning asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inventory:
    """A machine's processors and memory; detected, or read from `--inventory FILE`."""

    cpus: int
    memory_mib: int
