"""JSON Schemas of the documents, and the page that lists their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from deploy.output.contract.documents import COMMANDS, STATE, Envelope

Schema = dict[str, Any]

_MEANINGS = Path(__file__).with_name("meanings.yaml")
_ATTRIBUTE = re.compile(r"^ {4}(\w[\w, ]*): ", re.MULTILINE)
_HEAD = (
    "<!-- Generated from deploy/output/contract: do not edit, run\n"
    "     python scripts/reference.py -->\n\n# JSON output\n\n"
    "With `--json`, stdout is one document: the envelope below. `data` depends on the command.\n"
    "Each document has a JSON Schema, named after the command. Fields may be added; none is\n"
    "removed or renamed without a line in the changelog. `deploy status --watch --json` prints\n"
    "one envelope per line, with a [Frame](#frame).\n"
)


def file_names() -> dict[str, str]:
    """Return file name → command, or "" for the state file."""
    return {**{f"{name.replace(' ', '-')}.json": name for name in COMMANDS}, "state.json": ""}


def schema_for(command: str) -> Schema:
    """Return the schema of what a command prints with `--json`; of the state file for ""."""
    if not command:
        return _finished(TypeAdapter(STATE).json_schema(mode="serialization"))
    fields = {**get_type_hints(Envelope), "data": COMMANDS[command] | None}
    whole: Any = TypedDict("Envelope", fields)  # type: ignore[misc]
    whole.__doc__ = Envelope.__doc__
    return _finished(TypeAdapter(whole).json_schema(mode="serialization"))


def _finished(schema: Schema) -> Schema:
    """Close every object, require what is always printed, and describe the fields."""
    types = schema.get("$defs", {})
    about = {name: _documented(one.get("description", ""))[0] for name, one in types.items()}
    whole = "Envelope" if "data" in schema["properties"] else "StateFile"
    for name, one in ((whole, schema), *types.items()):
        if "properties" in one:
            _finish(name, one, about)
    return schema


def _finish(type_name: str, schema: Schema, about: Mapping[str, str]) -> None:
    described = schema.pop("description", "")
    schema["description"], said = _documented(described)
    meanings = field_meanings()
    shared, own = meanings["shared"], meanings["own"].get(type_name, {})
    fields = schema["properties"].items()
    always = {name for name, field in fields if "default" in field and "optional" not in field}
    required = always | set(schema.get("required", ()))
    schema["required"] = [name for name in schema["properties"] if name in required]
    schema.setdefault("additionalProperties", False)
    for name, field in schema["properties"].items():
        if field.pop("optional", False):  # where it is printed at all
            field.update(next(kind for kind in field.pop("anyOf") if kind != {"type": "null"}))
        field.pop("default", None)
        if field.pop("readOnly", False):  # computed: what it means is the docstring of a property
            text = field["description"].replace("None", "null")
            field["description"] = text[0].lower() + text[1:]
        field.pop("title", None)
        of_type = about.get(field.get("$ref", "").rpartition("/")[2], "")
        here = said.get(name) or field.get("description") or own.get(name)
        if meaning := here or of_type or shared.get(name):
            field["description"] = meaning


@cache
def field_meanings() -> Mapping[str, Any]:
    """Return field → meaning in every type (`shared`), and type → field → meaning (`own`)."""
    found: dict[str, Any] = yaml.safe_load(_MEANINGS.read_text(encoding="utf-8"))
    return found


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the summary of a docstring, and field → meaning of its attributes."""
    summary, _, attributes = docstring.replace("None", "null").partition("\n\nAttributes:\n")
    parts = _ATTRIBUTE.split(attributes)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    meanings = {
        name.strip(): " ".join(text.split()) for names, text in pairs for name in names.split(",")
    }
    return " ".join(summary.split()), meanings


def page() -> str:
    """Return the page that lists every field of every document."""
    types: dict[str, Schema] = {}
    rows = []
    for file, command in file_names().items():
        schema = schema_for(command)
        types |= schema.get("$defs", {})
        if not command:
            types["StateFile"] = schema
        shown = _type(schema["properties"]["data"]) if command else "[StateFile](#statefile)"
        what = f"`deploy {command}`" if command else "`state.json` of a stack"
        rows.append(f"| {what} | {shown} | [{file}](schemas/commands/{file}) |")
        if command:
            types["Envelope"] = schema
    envelope = types.pop("Envelope")
    listed = ("| command | data | schema |", "| --- | --- | --- |", *rows)
    tables = (line for name in sorted(types) for line in _section(name, types[name]))
    return "\n".join((_HEAD, *listed, "", *_section("Envelope", envelope), *tables)).rstrip() + "\n"


def _section(name: str, schema: Schema) -> Iterator[str]:
    yield f"## {name}\n"
    if schema.get("description"):
        yield f"{schema['description']}\n"
    if "properties" not in schema:
        yield f"{_type(schema)}\n"
        return
    yield "| field | type | meaning |"
    yield "| --- | --- | --- |"
    required = schema.get("required", ())
    for field, of in schema["properties"].items():
        kind = "depends on the command" if (name, field) == ("Envelope", "data") else _type(of)
        optional = "" if field in required else ", optional"
        meaning = of.get("description", "").replace("|", "\\|")
        yield f"| `{field}` | {kind}{optional} | {meaning} |"
    yield ""


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items") or schema.get("prefixItems", [{}])[0]
        return f"list of {_type(items)}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"map to {_type(values)}" if isinstance(values, dict) else "map"
    return str(schema.get("type", "any"))
