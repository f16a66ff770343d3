"""Remember which stack files the user allowed: named with -f or PDKIT_FILE, or on a question.

A deploy.yaml that merely lies in the current folder may be somebody else's, and can name programs.
What counts is where it lies, since its relative paths begin there, and its content. A note of this
is trusted only if this user's kit wrote it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from deploy.runtime.home import Home, write_private


def remember(home: Home, file: Path, content: bytes) -> bool:
    """Remember this file with this content; return False if the home folder is not writable."""
    text = _text(file, content)
    try:
        write_private(_note(home, text), text)
    except OSError:
        return False
    return True


def is_known(home: Home, file: Path, content: bytes) -> bool:
    """Tell whether the user allowed this file before, with the same content."""
    text = _text(file, content)
    expected = text.encode()
    try:
        # A link is not followed, and a FIFO does not keep its reader waiting.
        note = os.open(_note(home, text), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            seen = os.fstat(note)
            ours = seen.st_uid == os.getuid() and seen.st_nlink == 1 and not seen.st_mode & 0o077
            is_file = stat.S_ISREG(seen.st_mode)
            return ours and is_file and os.read(note, len(expected) + 1) == expected
        finally:
            os.close(note)
    except OSError:
        return False


def _text(file: Path, content: bytes) -> str:
    # The file itself may be a link: its target lies elsewhere.
    place = file.parent.resolve() / file.name
    return f"{hashlib.sha256(content).hexdigest()}  {str(place)!a}\n"


def _note(home: Home, text: str) -> Path:
    return home.state / "named-files" / hashlib.sha256(text.encode()).hexdigest()
