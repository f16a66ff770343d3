"""Validate the custom resources of an exported folder against the schemas of their definitions.

Usage: scripts/crds.py FOLDER CRD.yaml...

The definitions are those of DisaggregatedSet, the Prometheus Operator and KEDA, as their projects
publish them. A field that a schema lacks is an error, because an API server would drop it. Rules in
CEL (`x-kubernetes-validations`) are not evaluated. Exits with 1 if an object does not fit, and
where the folder has no object of a definition: then nothing was validated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

Kind = tuple[str, str]
_ROW = "{:<24} {:<34} {:>7} {:>9}"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder, *files = map(Path, arguments)
    schemas = dict(one for file in files for one in definitions(file.read_text(encoding="utf-8")))
    if not schemas:
        print(f"error: no definition in {', '.join(map(str, files))}", file=sys.stderr)
        return 2
    objects = list(custom_resources(folder, schemas))
    faults = {kind: list(misfits(schemas[kind], objects, kind)) for kind in schemas}
    print(_ROW.format("KIND", "VERSION", "OBJECTS", "MISFITS"))
    for kind in sorted(schemas):
        count = sum(one == kind for _, one, _ in objects)
        print(_ROW.format(kind[1], kind[0], count, len(faults[kind])))
    for fault in (one for of_kind in faults.values() for one in of_kind):
        print(f"error: {fault}", file=sys.stderr)
    # A definition may have versions that an export does not use.
    validated = {name for _, (_, name), _ in objects}
    missing = sorted({name for _, name in schemas} - validated)
    for name in missing:
        print(f"error: {folder} has no {name} of these versions", file=sys.stderr)
    return 1 if missing or any(faults.values()) else 0


def definitions(text: str) -> Iterator[tuple[Kind, Mapping[str, Any]]]:
    """Yield each version's kind and its schema, in which no field is unknown."""
    documents = [one or {} for one in yaml.safe_load_all(text)]
    # Of several definitions, kubectl prints a list.
    for one in (item for document in documents for item in document.get("items", [document])):
        if one.get("kind") != "CustomResourceDefinition":
            continue
        spec = one["spec"]
        for version in spec["versions"]:
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # of every object, not of its own
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def custom_resources(
    folder: Path, kinds: Iterable[Kind]
) -> Iterator[tuple[Path, Kind, Mapping[str, Any]]]:
    """Yield the objects of these kinds in a folder, with their files."""
    for file in sorted(folder.rglob("*.yaml")):
        for one in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            kind = (str(one.get("apiVersion")), str(one.get("kind")))
            if kind in kinds:
                yield file.relative_to(folder), kind, one


def misfits(
    schema: Mapping[str, Any], objects: Iterable[tuple[Path, Kind, Mapping[str, Any]]], kind: Kind
) -> Iterator[str]:
    """Yield what is wrong with the objects of a kind, a line each."""
    validator = Draft7Validator(schema)
    for file, one, content in objects:
        if one == kind:
            for error in validator.iter_errors(content):
                place = ".".join(map(str, error.absolute_path))
                yield f"{file}: {kind[1]} {place}: {error.message[:300]}"


def _strict(schema: Any) -> Any:
    """Return a structural schema as JSON Schema that allows no unknown field."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", open_ended)
    if schema.get("x-kubernetes-int-or-string") is True:
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return strict


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
