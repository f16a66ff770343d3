"""Known vulnerabilities of packages, from files in OSV's format: a JSON file, a folder or a zip."""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from deploy.errors import ConfigError

_MOST_BYTES = 64 << 20  # of one file; a record has some KiB
# RuntimeError: a zip with a password, or JSON of too many levels.
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
)
_EVENTS = ("introduced", "fixed", "last_affected")


@dataclass(frozen=True)
class Advisory:
    """A known vulnerability of a package in the version that an image gets.

    Attributes:
        id: such as GHSA-xxxx-xxxx-xxxx or PYSEC-2026-1.
        fixed: the lowest later version without it; "" if none is named.
    """

    id: str
    package: str
    version: str
    fixed: str


Pins = Mapping[str, str]


def read_advisories(path: Path) -> list[Mapping[str, Any]]:
    """Return OSV's records, without those that were withdrawn.

    Raises:
        ConfigError: a file cannot be read, or is no such record.
    """
    try:
        records = list(_records(path))
    except _UNREADABLE as exc:
        raise ConfigError(
            f"--advisories {path}: cannot be read ({exc})",
            hint="name a file, folder or zip of records in OSV's JSON format",
        ) from exc
    return [one for one in records if not one.get("withdrawn")]


def advisories_of(pins: Pins, records: Sequence[Mapping[str, Any]]) -> tuple[Advisory, ...]:
    """Return the known vulnerabilities of PyPI packages, name → version."""
    versions = {str(canonicalize_name(name)): version for name, version in pins.items()}
    found = {
        Advisory(record["id"], name, versions[name], fixed)
        for record in records
        for name, affected in _packages(record)
        if name in versions and (fixed := _fix(affected, versions[name])) is not None
    }
    return tuple(sorted(found, key=lambda one: (one.package, one.id)))


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    for text in _texts(path):
        found = json.loads(text)
        for record in found if isinstance(found, list) else [found]:
            if not _is_record(record):
                raise ValueError(f"{str(record)[:50]} is not a record")
            yield record


def _is_record(record: Any) -> bool:
    """Tell whether all that is looked at here has OSV's types."""
    try:
        for _, affected in _packages(record):
            _fix(affected, "0")
    except (AttributeError, KeyError, TypeError):
        return False
    return isinstance(record.get("id"), str)


def _texts(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield _bounded(file)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                if name.endswith(".json"):
                    with packed.open(name) as member:
                        yield _all_of(member)
    else:
        yield _bounded(path)


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return _all_of(file)


def _all_of(file: IO[bytes]) -> bytes:
    """Return a member's content, up to a limit: a zip may understate its size."""
    text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB in one file")
    return text


def _packages(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for affected in record.get("affected") or ():
        package = affected.get("package") or {}
        if package.get("ecosystem") == "PyPI":
            yield canonicalize_name(str(package.get("name"))), affected


def _fix(affected: Mapping[str, Any], pinned: str) -> str | None:
    """Return the version that fixes a pinned one, "" if none is named; None if it is not affected.

    Versions that are no versions of PyPI, such as a nightly's name, cannot be compared.
    """
    try:
        version = Version(Version(pinned).public)
    except InvalidVersion:
        return None
    ranges = [_events(one) for one in affected.get("ranges") or () if one.get("type") != "GIT"]
    listed = not {pinned, str(version)}.isdisjoint(affected.get("versions") or ())
    if not listed and not any(_holds(events, version) for events in ranges):
        return None
    fixes = sorted(at for events in ranges for at, kind in events if kind == "fixed")
    return next((str(at) for at in fixes if at > version), "")


def _events(versions: Mapping[str, Any]) -> list[tuple[Version, str]]:
    """Return the events of a range in order; none where one cannot be compared."""
    events = [(kind, one[kind]) for one in versions["events"] for kind in _EVENTS if kind in one]
    with suppress(InvalidVersion):
        return sorted((Version(str(at)), kind) for kind, at in events)
    return []


def _holds(events: Sequence[tuple[Version, str]], version: Version) -> bool:
    holds = False
    for at, kind in events:
        if kind == "last_affected":
            holds = holds and version <= at
        elif at <= version:
            holds = kind == "introduced"
    return holds
