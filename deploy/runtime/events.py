"""A stack's events (service died, restarted, drained), as one JSON object a line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from deploy.errors import printable
from deploy.runtime.own_files import read_text, remove_other

EventKind = Literal[
    "died", "hung", "back", "failed", "crash_loop", "restarted", "drained", "undrained"
]
_KEPT = 200
_MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class ServiceEvent:
    """Something that happened to a service.

    Attributes:
        at: when, in UTC.
        kind: a stable word for scripts.
    """

    at: str
    service: str
    kind: EventKind
    text: str


def note_event(file: Path, service: str, kind: EventKind, text: str) -> None:
    """Append an event; of a file that has grown too long, only the newest events are kept.

    The lock keeps writers apart. A reader takes none: it skips a line that is not whole.
    """
    remove_other(file)
    at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = json.dumps(asdict(ServiceEvent(at, service, kind, text))) + "\n"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_size > _MAX_BYTES:
            newest = b"".join(stream.readall().splitlines(keepends=True)[-_KEPT:])
            stream.truncate(0)
            stream.write(newest)
        stream.write(line.encode())


def read_events(file: Path) -> Sequence[ServiceEvent]:
    """Return the last events, the oldest first; none where the file cannot be read."""
    try:
        lines = read_text(file, errors="replace").splitlines()[-_KEPT:]
    except OSError:
        return []
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: str) -> ServiceEvent | None:
    """Parse a line; None if it is incomplete, damaged, or written by a later version."""
    try:
        found = ServiceEvent(**json.loads(line))
        datetime.fromisoformat(found.at)
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(isinstance(value, str) for value in asdict(found).values()):
        return None
    return replace(found, service=printable(found.service), text=printable(found.text))
