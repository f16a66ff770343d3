"""Which stack files the user has named: those of a folder may be another's, and name programs."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from deploy.runtime.home import Home
from deploy.runtime.state import write_private


def remember(home: Home, file: Path) -> None:
    """Note that the user named this file, as it is now; where nothing can be noted, that is all."""
    with suppress(OSError):
        write_private(_note(home, file), "")


def is_known(home: Home, file: Path) -> bool:
    """Tell whether the user named this file before, as it is now."""
    return _note(home, file).exists()


def _note(home: Home, file: Path) -> Path:
    found = hashlib.sha256(str(file.resolve()).encode() + b"\0" + file.read_bytes())
    return home.state / "named-files" / found.hexdigest()
