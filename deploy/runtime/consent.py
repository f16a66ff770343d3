"""Remember which stack files the user named with -f or PDKIT_FILE.

A deploy.yaml that merely lies in the current folder may be somebody else's, and can name programs.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from deploy.runtime.home import Home, write_private


def remember(home: Home, file: Path) -> None:
    """Remember this file with its present content; ignore a home folder that is not writable."""
    with suppress(OSError):
        write_private(_note(home, file), "")


def is_known(home: Home, file: Path) -> bool:
    """Tell whether the user named this file before, with the same content."""
    return _note(home, file).exists()


def _note(home: Home, file: Path) -> Path:
    found = hashlib.sha256(str(file.resolve()).encode() + b"\0" + file.read_bytes())
    return home.state / "named-files" / found.hexdigest()
