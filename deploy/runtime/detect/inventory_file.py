"""`--inventory FILE`: a machine described by hand, or recorded from another one.

    cpus: 128
    memory_mib: 2097152
    gpus: {vendor: rocm, count: 8, memory_mib: 196592, name: AMD Instinct MI300X, arch: gfx942}

`gpus` may also be a list, with what each GPU has. For ROCm, what is not named is as on a machine
that has nothing else: render nodes from /dev/dri/renderD128 on, and the groups that Ubuntu 22.04
numbers 44 (video) and 109 (render); `getent group video render` tells those of a machine.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.errors import ConfigError
from deploy.planning.inventory import (
    FIRST_RENDER_MINOR,
    ROCM_GROUPS,
    Gpu,
    Inventory,
    inventory_from,
)

_VENDORS = ("cuda", "rocm")
_MAX_COUNT = 1024
_MACHINE_KEYS = tuple(field.name for field in dataclasses.fields(Inventory))
_GPU_KEYS = tuple(field.name for field in dataclasses.fields(Gpu))
# What equal GPUs have in common.
_EQUAL_KEYS = ("vendor", "count", "memory_mib", "name", "arch")
_TEXT_KEYS = ("name", "uuid", "render_node", "arch")
_EXAMPLE = "write two lines into it: 'cpus: 64' and 'memory_mib: 262144'"


class _Wrong(Exception):
    """A field that is not what it should be; its text names field, value and what is right."""


def read_inventory(path: Path) -> Inventory:
    """Return the machine that a YAML or JSON file describes.

    Reads back what `dataclasses.asdict` makes of an inventory.

    Raises:
        ConfigError: naming the file, the field, its value, and what would be right.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"--inventory {path}: cannot be read ({exc.strerror})",
            hint="name an existing file with --inventory",
        ) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--inventory {path}: not valid YAML{where}", hint=_EXAMPLE) from exc
    try:
        return inventory_from(_machine(raw))
    except _Wrong as exc:
        raise ConfigError(f"--inventory {path}: {exc}", hint=_hint(path, raw)) from exc


def _hint(path: Path, raw: object) -> str:
    return f"fix {path} and run the command again" if isinstance(raw, dict) else _EXAMPLE


def _machine(raw: object) -> dict[str, Any]:
    """Return the plain values of an inventory, complete and checked."""
    if not isinstance(raw, dict):
        raise _Wrong("does not describe a machine: expected lines such as 'cpus: 64'")
    _refuse_unknown(raw, _MACHINE_KEYS, "")
    values = {**raw, **{key: _number(raw, key, "") for key in ("cpus", "memory_mib")}}
    values["gpus"] = _gpus(raw.get("gpus"))
    rocm = any(gpu["vendor"] == "rocm" for gpu in values["gpus"])
    groups = raw.get("gpu_groups", ROCM_GROUPS if rocm else ())
    values["gpu_groups"] = [
        _whole(group, f"gpu_groups[{at}]", least=0, example="109")
        for at, group in enumerate(_list(groups, "gpu_groups", "[44, 109]"))
    ]
    for key, example in (("container_gpus", "[nvidia]"), ("seen", "[]")):
        listed = _list(raw.get(key), key, example)
        values[key] = [_text(text, f"{key}[{at}]") for at, text in enumerate(listed)]
    return values


def _gpus(raw: object) -> list[dict[str, Any]]:
    if isinstance(raw, dict):
        listed = _equal_gpus(raw)
    else:
        rows = _list(raw, "gpus", "[{vendor: cuda, memory_mib: 81559}]")
        listed = [_gpu(row, at) for at, row in enumerate(rows)]
    seen: set[tuple[str, int]] = set()
    for at, gpu in enumerate(listed):
        place = (gpu["vendor"], gpu["index"])
        if place in seen:
            raise _Wrong(
                f"gpus[{at}].index: another {gpu['vendor']} GPU has index {gpu['index']}, too"
            )
        seen.add(place)
    return listed


def _equal_gpus(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    _refuse_unknown(raw, _EQUAL_KEYS, "gpus.")
    count = _number(raw, "count", "gpus.")
    if count > _MAX_COUNT:
        raise _Wrong(f"gpus.count: {count} is more than {_MAX_COUNT}, which no machine has")
    one = {key: value for key, value in raw.items() if key != "count"}
    return [_gpu(one, at, where="gpus.") for at in range(count)]


def _gpu(raw: object, at: int, where: str = "") -> dict[str, Any]:
    where = where or f"gpus[{at}]."
    if not isinstance(raw, dict):
        raise _Wrong(
            f"{where[:-1]}: {raw!r} is not a GPU: expected {{vendor: cuda, memory_mib: 81559}}"
        )
    _refuse_unknown(raw, _GPU_KEYS, where)
    vendor = raw.get("vendor")
    if vendor not in _VENDORS:
        said = "is missing" if vendor is None else f"{vendor!r} is not valid"
        raise _Wrong(f"{where}vendor: {said}: expected cuda or rocm")
    index = _whole(raw.get("index", at), f"{where}index", least=0, example=str(at))
    values = {"name": "", **raw, "index": index, "memory_mib": _number(raw, "memory_mib", where)}
    values |= {key: _text(raw[key], f"{where}{key}") for key in _TEXT_KEYS if key in raw}
    if vendor == "rocm":
        values.setdefault("render_node", f"/dev/dri/renderD{FIRST_RENDER_MINOR + index}")
    return values


def _number(raw: Mapping[str, Any], key: str, where: str) -> int:
    examples = {"cpus": "64", "memory_mib": "262144", "count": "8"}
    if raw.get(key) is None:
        raise _Wrong(f"{where}{key}: is missing: expected a number such as {examples[key]}")
    return _whole(raw[key], f"{where}{key}", least=1, example=examples[key])


def _whole(value: object, field: str, *, least: int, example: str) -> int:
    # True is a number to Python, and no number of anything.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        unit = " of MiB, without a unit," if field.endswith("memory_mib") else ""
        raise _Wrong(
            f"{field}: {value!r} is not valid: "
            f"expected a whole number{unit} of at least {least}, such as {example}"
        )
    return value


def _text(value: object, field: str) -> str:
    """Return a text; YAML takes a capability such as 9.0, and a name such as 4090, for numbers."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _Wrong(f"{field}: {value!r} is not valid: expected a string")
    return str(value)


def _list(value: object, field: str, example: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _Wrong(f"{field}: {value!r} is not valid: expected a list, such as {example}")
    return value


def _refuse_unknown(raw: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            guess = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
            raise _Wrong(f"unknown key '{where}{key}'; {guess}")
