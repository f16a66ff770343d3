"""The engines that the router leaves alone, in a file that it follows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def drained_engines(file: Path) -> frozenset[str]:
    """Return the names in the file; none where there is no file."""
    try:
        return frozenset(file.read_text(encoding="utf-8").split())
    except FileNotFoundError:
        return frozenset()


def write_drained(file: Path, engines: Iterable[str]) -> None:
    """Replace the file in one step.

    Others may read it, but not its stack's folder: a router's container has another user.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_suffix(".tmp")
    new.write_text("".join(f"{name}\n" for name in sorted(engines)), encoding="utf-8")
    new.chmod(0o644)
    new.replace(file)
