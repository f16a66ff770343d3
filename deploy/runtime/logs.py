"""Log files: their last lines, new lines, and which of them are warnings or errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from deploy.errors import printable
from deploy.metrics.reading import Complaint
from deploy.runtime.own_files import opened_file

_TAIL_BYTES = 256 * 1024
# Patterns are compiled when they are used: most commands read no log.
# An exception as the end of a traceback names it; the connector's own say what they mean instead.
_EXCEPTION = r"(?:pdkit_connector\.errors\.\w+|(?:\w+\.)*\w*(?:Error|Exception)): "
_ERROR = rf"(?:\(.*\] )?\s*(?P<said>{_EXCEPTION}.+)$"
# How warnings and errors begin in the logs of vLLM, LMCache, the connector, the router, Redis (a #)
# and uvicorn; and an uncaught exception.
_COMPLAINTS = tuple(
    r"(?:\(\w+ pid=\d+\) )?" + form
    for form in (
        r"(?P<level>WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[(?P<source>[^\]]+)\] ?(?P<said>.*)",
        r"\[[\d ,:-]+\] LMCache (?P<level>WARNING|ERROR|CRITICAL):\s*(?P<said>.*?)"
        r"(?:\((?P<source>[\w.]+:\d+):[\w.]+\))?$",
        r"[\d-]+ [\d:,]+ (?P<level>WARNING|ERROR) pdkit-connector (?:WARNING |ERROR )?(?P<said>.*)",
        r"[\d-]+ [\d:]+ (?P<level>WARNING|ERROR) router: (?P<said>.*)",
        r"\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ (?P<level>#) (?:WARNING:? )?(?P<said>.*)",
        r"(?P<level>WARNING|ERROR): +(?P<said>.*)",
        rf"(?P<said>{_EXCEPTION}.+)",
    )
)
_TRACEBACK = rf"\s|Traceback |\^|$|{_EXCEPTION}"
# Escape sequences: colours and cursor; titles and clipboard, up to their end; all others.
_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])"


def last_lines(path: Path, count: int | None = None, *, since: int = 0) -> tuple[str, ...]:
    """Return up to `count` last lines, else all, without colour codes; none if there is no file.

    Args:
        since: where to begin, in bytes, if all are wanted.
    """
    try:
        with opened_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            first = since if count is None else max(0, size - _TAIL_BYTES)
            if first < size:
                file.seek(first, os.SEEK_DATA)  # an engine may have freed the oldest part
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ()
    lines = text.splitlines()
    return tuple(
        plain(line) for line in (lines if count is None else lines[max(0, len(lines) - count) :])
    )


def plain(text: str) -> str:
    """Return a text without control sequences: clients choose much of what is logged."""
    return printable(re.sub(_ESCAPES, "", text))


def first_error(lines: Iterable[str]) -> str:
    """Return the first exception that log lines name, such as "OSError: no space", or "".

    The first, because one process of an engine takes the others down, and the last ones only report
    that another one failed.
    """
    found = (re.match(_ERROR, line) for line in lines)
    return next((match["said"].strip() for match in found if match), "")


class LogReader(Protocol):
    """Reads what services append to their logs, from the reader's creation on.

    Attributes:
        poll_s: seconds to wait between two reads.
    """

    poll_s: float

    def read(self) -> list[tuple[str, str]]:
        """Return (service, line) for each line written since the last call."""


class FileReader:
    """What is appended to files from now on, by the names of their services."""

    poll_s = 0.2

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._offsets = {name: _size(path) for name, path in paths.items()}

    def read(self) -> list[tuple[str, str]]:
        return [(name, line) for name in self._paths for line in self._appended(name)]

    def _appended(self, name: str) -> list[str]:
        path, size = self._paths[name], _size(self._paths[name])
        if size < self._offsets[name]:
            self._offsets[name] = 0  # the file was truncated
        if size == self._offsets[name]:
            return []
        with opened_file(path) as file:
            file.seek(self._offsets[name])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a line still being written waits for its end
        self._offsets[name] += len(whole)
        return [plain(line) for line in whole.decode("utf-8", "replace").splitlines()]


def follow(reader: LogReader) -> Iterator[tuple[str, str]]:
    """Yield (service, line) as lines are written, until the caller stops asking."""
    while True:
        yield from reader.read()
        time.sleep(reader.poll_s)


def complaints(lines: Iterable[tuple[str, str]]) -> tuple[Complaint, ...]:
    """Return the warnings and errors among (service, line); equal ones are merged.

    Of a traceback, only the exception is kept.
    """
    found: dict[tuple[str, str, str], Complaint] = {}
    for service, line in lines:
        one = _complaint(service, line)
        if one is None:
            continue
        key = (service, one.level, one.source or one.text)
        before = found.get(key)
        found[key] = _together(before, one) if before else one
    return tuple(replace(one, text=one.text.strip()) for one in found.values())


def _complaint(service: str, line: str) -> Complaint | None:
    for form in _COMPLAINTS:
        match = re.match(form, line)
        if match:
            known = match.groupdict()
            mild = (known.get("level") or "ERROR")[0] in "W#"
            level: Literal["warning", "error"] = "warning" if mild else "error"
            return Complaint(service, level, known["said"].rstrip(), known.get("source") or "")
    return None


def _together(before: Complaint, after: Complaint) -> Complaint:
    if re.match(_TRACEBACK, after.text) or re.match(_TRACEBACK, before.text):
        raised = re.match(_EXCEPTION, after.text) and not re.match(_EXCEPTION, before.text)
        told = after if raised else before
        return replace(told, count=before.count)
    return replace(before, count=before.count + 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
