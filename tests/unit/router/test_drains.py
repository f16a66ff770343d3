"""The list of drained engines, as the router reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pdkit_router.drains import Drains


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "damage",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b"\xff"),
    ],
    ids=["pipe", "folder", "device", "binary"],
)
def test_engines_stay_as_they_were_while_it_cannot_be_read(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    """A router that waited for the writer of a pipe would serve nobody."""
    engine: Any = SimpleNamespace(name="consumer-0", drained=False)
    drains = Drains(tmp_path / "drained", [engine])
    (tmp_path / "drained").write_text("consumer-0\n")
    drains.read()
    assert engine.drained
    (tmp_path / "drained").unlink()
    damage(tmp_path / "drained")
    drains.read()
    assert engine.drained
