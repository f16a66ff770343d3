"""What reaches the terminal: text and errors, also where the reader is gone."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from deploy.errors import PdkitError, printable


def print_error(error: PdkitError) -> None:
    """Print an error, its details and its hint to stderr."""
    lines = [f"error: {error.message}", *(f"  | {line}" for line in error.details)]
    if error.hint:
        lines.append(f"try: {error.hint}")
    print_text("\n".join(lines), sys.stderr)


def print_text(text: str, stream: TextIO) -> None:
    """Print; if the reader is gone, as with `head`, keep the exit code."""
    if not text:
        return
    try:
        print(printable(text), file=stream, flush=True)
    except BrokenPipeError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Discard what is still buffered, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress() -> Callable[[str], None]:
    """Return a callback that writes lines with the seconds passed to stderr."""
    began = time.monotonic()

    def report(line: str) -> None:
        # A closed terminal must not stop the work or its cleanup.
        with contextlib.suppress(OSError):
            print(
                f"[{time.monotonic() - began:6.1f} s] {printable(line)}",
                file=sys.stderr,
                flush=True,
            )

    return report
