"""Log files: their last lines, and what is appended to them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_ERROR = re.compile(r"(?:\(.*\] )?\s*(?P<said>(?:\w+\.)*\w*(?:Error|Exception): .+)$")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def last_lines(path: Path, count: int | None = None) -> tuple[str, ...]:
    """Return up to `count` last lines, else all, without colour codes; none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0 if count is None else max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ()
    lines = text.splitlines()
    return tuple(
        plain(line) for line in (lines if count is None else lines[max(0, len(lines) - count) :])
    )


def plain(text: str) -> str:
    """Return a text without colour codes."""
    return _ESCAPES.sub("", text)


def first_error(lines: Iterable[str]) -> str:
    """Return the first exception that log lines name, such as "OSError: no space", or "".

    The first, because an engine's processes fall over one another, and what the last one says is
    that an earlier one failed.
    """
    found = (_ERROR.match(line) for line in lines)
    return next((match["said"].strip() for match in found if match), "")


def follow(paths: Mapping[str, Path], *, poll_s: float = 0.2) -> Iterator[tuple[str, str]]:
    """Yield (name, line) for what is appended from now on, until the caller stops asking."""
    offsets = {name: _size(path) for name, path in paths.items()}
    while True:
        for name, path in paths.items():
            if _size(path) < offsets[name]:
                offsets[name] = 0  # begun anew
            if _size(path) > offsets[name]:
                yield from ((name, line) for line in _read_on(path, name, offsets))
        time.sleep(poll_s)


def _read_on(path: Path, name: str, offsets: dict[str, int]) -> list[str]:
    with path.open("rb") as file:
        file.seek(offsets[name])
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]  # a line still being written waits for its end
    offsets[name] += len(whole)
    return [plain(line) for line in whole.decode("utf-8", "replace").splitlines()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
