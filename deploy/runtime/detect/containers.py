"""How Docker gives GPUs to containers here: the nvidia runtime, or device specs (CDI)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SPEC_FOLDERS = ("/etc/cdi", "/var/run/cdi")
_SUFFIXES = (".yaml", ".yml", ".json")


def container_gpus(info: Mapping[str, Any] | None, cdi_kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the ways in which containers get GPUs: 'nvidia', then CDI kinds, in order.

    Args:
        info: the Docker daemon's `info`; None means not asked, so nothing is known.
        cdi_kinds: kinds with a spec file. They count only where the daemon reads such files, and
            does not itself list the devices it found in them, as it does since Docker 28.2.
    """
    if info is None:
        return ()
    kinds = set(cdi_kinds) if info.get("CDISpecDirs") else set()
    discovered = info.get("DiscoveredDevices")
    if isinstance(discovered, list) and discovered:
        kinds = {_kind(device) for device in discovered}
    runtimes = info.get("Runtimes")
    runtime = ("nvidia",) if isinstance(runtimes, Mapping) and "nvidia" in runtimes else ()
    return (*runtime, *sorted(kind for kind in kinds if kind.endswith("/gpu")))


def _kind(device: object) -> str:
    """Return 'nvidia.com/gpu' of {"Source": "cdi", "ID": "nvidia.com/gpu=0"}."""
    if not isinstance(device, Mapping) or device.get("Source") != "cdi":
        return ""
    return str(device.get("ID", "")).partition("=")[0]


def parse_spec(text: str) -> str:
    """Return the kind that a CDI spec file offers devices of; "" if it is broken or empty."""
    import yaml

    # libyaml's loader where there is one: an NVIDIA spec has thousands of lines.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # JSON is YAML too, and its own parser is much faster.
        is_json = text.lstrip()[:1] == "{"
        raw = json.loads(text) if is_json else yaml.load(text, Loader=loader)  # noqa: S506 - a safe one
    except (ValueError, yaml.YAMLError, RecursionError):
        return ""
    if not isinstance(raw, dict) or not raw.get("devices"):
        return ""
    return str(raw.get("kind", ""))


def read_cdi_kinds(info: Mapping[str, Any] | None, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the kinds with a spec file where this daemon looks; what cannot be read is skipped."""
    named = (info or {}).get("CDISpecDirs")
    folders = named if isinstance(named, list) and named else SPEC_FOLDERS
    kinds: set[str] = set()
    for folder in folders:
        for path in _files(root / str(folder).lstrip("/")):
            try:
                kinds.add(parse_spec(path.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError):
                continue
    return tuple(sorted(kinds - {""}))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    except OSError:
        return []
