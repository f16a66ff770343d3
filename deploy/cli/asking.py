"""The one question that the command line asks: may a deploy.yaml that it found be used?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.config.sources import SpecSource

# Nobody reads more than this before typing y.
_MOST_CHARACTERS = 4000
_PATIENCE_S = 300


def is_allowed_now(source: SpecSource, reaching: Sequence[str]) -> bool:
    """Show what a file sets that can do harm, and ask; False where nobody can read and answer."""
    if not _someone_is_there():
        return False
    from deploy.output.settings_view import settings_view

    shown = settings_view(source.spec, reaching)
    if len(shown) > _MOST_CHARACTERS:
        return False
    return _answer(
        f"{source.file} is new or has changed since you used it. With these settings it can run "
        f"programs, open ports or send secrets:\n\n{shown}\n"
        "Use it, and remember this until the file changes? [y/N] "
    ) in (b"y", b"yes")


def _someone_is_there() -> bool:
    """Whether a person can answer: not in CI, which may have a terminal, nor in the background."""
    # With a pipe as stdout, a pager behind it may read the same terminal.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if os.environ.get("CI") or not all(stream and stream.isatty() for stream in streams):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return False


def _answer(question: str) -> bytes:
    """Return the line that is typed after the question, without what was typed ahead of it."""
    import select
    import termios

    terminal = sys.stdin.fileno()
    termios.tcflush(terminal, termios.TCIFLUSH)
    print(question, end="", file=sys.stderr, flush=True)
    if not select.select([terminal], [], [], _PATIENCE_S)[0]:
        print(f"no answer in {_PATIENCE_S} s", file=sys.stderr)
        return b""
    return os.read(terminal, 1024).strip().lower()
