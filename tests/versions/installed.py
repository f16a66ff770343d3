"""The LMCache releases under test."""

from __future__ import annotations

from pathlib import Path

from tests.wheels import cache_folder, unpacked

WHEELS = Path(__file__).with_name("wheels.txt")


def pinned() -> dict[str, str]:
    """Return version → its line of wheels.txt, oldest first."""
    lines = WHEELS.read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[2].split()[0]: line for line in lines if "==" in line}


VERSIONS = tuple(pinned())


def installed(version: str) -> Path:
    """Return the folder that holds `version` without its dependencies, fetched once."""
    return unpacked(pinned()[version], cache_folder() / "lmcache" / version)
