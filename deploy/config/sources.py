"""Merge flags, environment variables and deploy.yaml into one spec that knows its sources.

Precedence: flags, then `PDKIT_*` variables, then the file, then the defaults of the spec.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from deploy.config.spec import REMOVED, StackSpec
from deploy.config.vendors import meant_vendor
from deploy.errors import HELP, ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

DEFAULT_FILE = Path("deploy.yaml")

# Top-level scalar fields that a `PDKIT_<FIELD>` variable may set.
ENV_FIELDS = (
    "name", "vendor", "runtime", "gpus", "topology", "producers", "consumers", "tp", "model",
    "connector", "layerwise", "save_decode_cache", "port", "bind", "image",
    "allow_untested", "allow_keyless", "gpu_access", "hub_cache", "hf_token_file", "api_key_file",
    "supervise", "monitoring",
)  # fmt: skip

# Settings that name programs and their arguments, secrets or addresses, or open ports.
REACHING = (
    "engine.python", "engine.args", "engine.env", "engine.bind", "engine.key_file", "image",
    "redis.server", "redis.image", "redis.url_file", "redis.tls_files", "router.image",
    "router.engines", "hub_cache", "hf_token_file", "api_key_file", "bind", "allow_keyless",
    "monitoring", "tracing.otlp_endpoint",
)  # fmt: skip

_SHAPES = {
    "name": "lower-case letters, digits, '-' and '_', at most 40, such as 'demo'",
    "topology": "producers (prefill) and consumers (decode), such as 1p3d; or aggregated engines, "
    "such as 4a, or 4a+redis with two or more",
}


# What is expected instead, by pydantic's error type.
_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "path_type": "expected a path",
    "tuple_type": "expected a list, such as [a, b]",
    "dict_type": "expected a mapping, such as {{NAME: value}}",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than_equal": "expected at most {le:g}",
}


# Values as errors show them: aliases make a file of a few lines a list of a billion.
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 1, 200, 200


@dataclass(frozen=True)
class SpecSource:
    """A spec and, for each top-level field, where it was set: '--gpus', 'PDKIT_GPUS' or a file.

    Attributes:
        content: the bytes of the file that the spec was read from.
    """

    spec: StackSpec
    origins: Mapping[str, str]
    file: Path | None
    content: bytes

    def reaching(self) -> tuple[str, ...]:
        """Return the settings of the file that name programs, secrets or addresses."""
        from_file = {field for field, origin in self.origins.items() if origin == str(self.file)}
        return tuple(name for name in REACHING if _is_set(self.spec, name, from_file))


def _is_set(spec: StackSpec, name: str, fields: set[str]) -> bool:
    field, _, key = name.partition(".")
    return field in fields and (not key or key in getattr(spec, field).model_fields_set)


def load_spec(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
) -> SpecSource:
    """Return the spec from flags (None means not given), environment and file.

    Without `file` and PDKIT_FILE, deploy.yaml in the current folder is read if it exists.

    Raises:
        ConfigError: naming field, value, origin and what is expected.
    """
    path = named_file(file, environ) or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    from_file, content = _from_file(path) if path else ({}, b"")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin_values in (from_file, _from_environ(environ), _from_flags(flags)):
        for field, (value, origin) in origin_values.items():
            values[field] = value
            origins[field] = origin
    _drop_overruled_split(values, origins)
    try:
        return SpecSource(_valid(values, origins), origins, path, content)
    except ValueError as exc:  # a number that is too long to be shown
        raise ConfigError(f"{path}: {exc}", hint=f"fix {path} and run the command again") from exc


def _valid(values: Mapping[str, Any], origins: Mapping[str, str]) -> StackSpec:
    try:
        return StackSpec.model_validate(values)
    except ValidationError as exc:
        raise _explain(exc.errors()[0], origins) from exc


def named_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file that the user names, by -f or by PDKIT_FILE."""
    return file or (Path(environ["PDKIT_FILE"]) if environ.get("PDKIT_FILE") else None)


def _from_file(path: Path) -> tuple[dict[str, tuple[Any, str]], bytes]:
    from deploy.config.sources import read_spec_file

    settings, content = read_spec_file(path)
    return {field: (value, str(path)) for field, value in settings.items()}, content


def _from_environ(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = {}
    for field in ENV_FIELDS:
        variable = f"PDKIT_{field.upper()}"
        if environ.get(variable):
            found[field] = (environ[variable], variable)
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    return {
        field: (value, f"--{field.replace('_', '-')}")
        for field, value in flags.items()
        if value is not None
    }


def _drop_overruled_split(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Let a split given by a stronger source replace one given by a weaker source.

    `--gpus 4` over a file's `topology: 1p1d` means four engines, not a contradiction; two forms
    from the same source stay and are compared by the planner.
    """
    strength = {"topology": 0, "producers": 0, "consumers": 0, "gpus": 0}
    for field in strength:
        origin = origins.get(field, "")
        strength[field] = 3 if origin.startswith("--") else 2 if origin.startswith("PDKIT_") else 1
    given = {field: rank for field, rank in strength.items() if field in values}
    strongest = {f for f, rank in given.items() if rank == max(given.values())}
    for field in given.keys() - strongest:
        if {field, *strongest} <= {"producers", "consumers"}:
            continue  # these two belong together: setting one keeps the other
        del values[field], origins[field]


def _explain(error: ErrorDetails, origins: Mapping[str, str]) -> ConfigError:
    location = tuple(str(part) for part in error["loc"])
    field = ".".join(location)
    origin = origins.get(location[0], "") if location else ""
    shown = origin if origin.startswith(("--", "PDKIT_")) else f"{origin}: {field}"
    if error["type"] == "extra_forbidden":
        return _unknown_key(location, origin)
    return ConfigError(
        f"{shown}: {_SHOWN.repr(error['input'])} is not valid: {_expectation(error, location)}",
        hint=HELP if origin.startswith("--") else f"fix {origin} and run the command again",
    )


def _expectation(error: ErrorDetails, location: tuple[str, ...]) -> str:
    kind, value = error["type"], error["input"]
    if kind == "string_pattern_mismatch" and location[-1] in _SHAPES:
        return f"expected {_SHAPES[location[-1]]}"
    plain = isinstance(value, (bool, int, float))
    if kind == "string_type" and location[:2] == ("engine", "env") and plain:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f'expected a string; quote it: "{text}"'
    if kind in ("model_type", "model_attributes_type"):
        return f"expected a mapping with the keys {', '.join(_keys_at(list(location)))}"
    if kind == "literal_error":
        meant = meant_vendor(value) if location == ("vendor",) and isinstance(value, str) else ""
        return f"expected {error['ctx']['expected']}" + (
            f"; did you mean '{meant}'?" if meant else ""
        )
    if kind in _EXPECTED:
        return _EXPECTED[kind].format_map(error.get("ctx", {}))
    said = error["msg"].removeprefix("Value error, ")
    return said[0].lower() + said[1:]


def _unknown_key(location: tuple[str, ...], origin: str) -> ConfigError:
    *parents, key = location
    if location in REMOVED:
        return ConfigError(
            f"{origin}: {key} {REMOVED[location]}",
            hint=f"leave {key} out of {origin} and run the command again",
        )
    known = _keys_at(parents)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    guess = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
    return ConfigError(
        f"{origin}: unknown key '{'.'.join(location)}'{guess}",
        hint=f"fix {origin} and run the command again",
    )


def _keys_at(parents: list[str]) -> list[str]:
    model: type[BaseModel] = StackSpec
    for parent in parents:
        annotation = model.model_fields[parent].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


class _DuplicateKeyError(Exception):
    """A duplicate key in a mapping; the message names it and both lines."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    first = lines[key.value]
                    where = f"lines {first} and {line}" if first != line else f"line {line}"
                    raise _DuplicateKeyError(f"duplicate key '{key.value}' ({where})")
                lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


def read_spec_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the settings of a deploy.yaml, and the content that they are from.

    A key without a value counts as not given.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
    """
    try:
        content = path.read_bytes()
        document = yaml.load(content.decode(), Loader=_Loader)  # noqa: S506 - safe
    except OSError as exc:
        raise ConfigError(
            f"-f {path}: cannot be read ({exc.strerror})", hint="name an existing file with -f"
        ) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}: not valid YAML{where}", hint=f"fix {path} and run the command again"
        ) from exc
    except _DuplicateKeyError as exc:
        raise ConfigError(
            f"{path}: {exc}", hint=f"remove one of them from {path} and run the command again"
        ) from exc
    except (ValueError, RecursionError) as exc:  # no such day, a number too long, too many levels
        raise ConfigError(f"{path}: {exc}", hint=f"fix {path} and run the command again") from exc
    if document is None:
        return {}, content
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: expected a mapping at the top level, not a {type(document).__name__}",
            hint=f"write {path} as lines such as 'topology: 1p1d'",
        )
    settings = {str(field): value for field, value in document.items() if value is not None}
    return settings, content
