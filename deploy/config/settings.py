"""Every setting in words: for the reference page, and as the deploy.yaml of `deploy init`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from deploy.config.spec import StackSpec
from deploy.errors import printable

_WIDTH = 100
_HEAD = """\
# A stack of pdkit: all settings, with their meanings, values and defaults. To change one, remove
# the '#' in front of it and edit the value. Show the result with: deploy plan
# Command-line options and PDKIT_* variables take precedence over this file.
"""


@dataclass(frozen=True)
class SpecSetting:
    """One key of deploy.yaml.

    Attributes:
        value: which values it takes, in words.
        default: None if the planner decides.
        meaning: the description in the spec.
    """

    name: str
    value: str
    default: Any
    meaning: str

    @property
    def default_text(self) -> str:
        """The default in YAML."""
        return flow(self.default)


@dataclass(frozen=True)
class SettingGroup:
    """A mapping of deploy.yaml; `name` is "" for the top level."""

    name: str
    meaning: str
    settings: tuple[SpecSetting, ...]


def groups_of(spec: type[BaseModel]) -> tuple[SettingGroup, ...]:
    """Return the top level and all groups of a spec, in its order.

    Raises:
        LookupError: a field has no description.
    """
    schema = spec.model_json_schema()
    top, groups = {}, []
    for name, field in schema["properties"].items():
        if "$ref" in field:
            group = schema["$defs"][field["$ref"].rpartition("/")[2]]
            meaning = " ".join(group.get("description", "").split())
            groups.append(SettingGroup(name, meaning, _settings(group["properties"])))
        else:
            top[name] = field
    return (SettingGroup("", "", _settings(top)), *groups)


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def listed(words: Sequence[str], last: str) -> str:
    """Return words as a list for people."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if words[1:] else words[0]


def _settings(fields: Mapping[str, Any]) -> tuple[SpecSetting, ...]:
    return tuple(_setting(name, field) for name, field in fields.items())


def _setting(name: str, field: Mapping[str, Any]) -> SpecSetting:
    if not field.get("description"):
        raise LookupError(f"the field '{name}' of deploy/config/spec.py has no description")
    return SpecSetting(name, _value(field), field.get("default", {}), str(field["description"]))


def _value(field: Mapping[str, Any]) -> str:
    for one in field.get("anyOf", ()):
        if one.get("type") != "null":
            return _value(one)
    if "enum" in field:
        return listed([f"`{word}`" for word in field["enum"]], last="or")
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type")
    if kind in ("integer", "number"):
        return ("whole number" if kind == "integer" else "number") + _range(field)
    if kind == "array":
        return f"list of {_value(field['items'])}s"
    names = {"boolean": "true or false", "object": "mapping of names to strings", "string": "text"}
    return "path" if field.get("format") == "path" else names.get(str(kind), "mapping")


def _range(field: Mapping[str, Any]) -> str:
    least, above, most = (field.get(k) for k in ("minimum", "exclusiveMinimum", "maximum"))
    words = [f" from {least}"] if least is not None else []
    words += [f" above {above:g}"] if above is not None else []
    words += [f" to {most:g}" if least is not None else f", at most {most:g}"] if most else []
    return "".join(words)


def example_yaml(
    given: Mapping[str, Any] | None = None, remarks: Mapping[str, str] | None = None
) -> str:
    """Return the text of a deploy.yaml in which all but `given` is commented out.

    Args:
        given: top-level settings with their values.
        remarks: what to add to the comment of a top-level setting; "" is the file's own.
    """
    given, remarks = given or {}, remarks or {}
    blocks = [_HEAD.rstrip("\n")]
    if remarks.get(""):
        blocks += ["\n".join(_comment(remarks[""]))]
    for group in groups_of(StackSpec):
        blocks += _blocks(group, given, remarks)
    return "\n\n".join(blocks) + "\n"


def _blocks(
    group: SettingGroup, given: Mapping[str, Any], remarks: Mapping[str, str]
) -> Iterator[str]:
    if not group.name:
        for setting in group.settings:
            yield "\n".join(_lines(setting, given, remarks))
        return
    lines = [*_comment(group.meaning), f"{group.name}:"]
    for setting in group.settings:
        lines += (f"  {line}" for line in _lines(setting, {}, {}))
    yield "\n".join(lines)


def _lines(
    setting: SpecSetting, given: Mapping[str, Any], remarks: Mapping[str, str]
) -> Iterator[str]:
    name, value = setting.name, f"value: {setting.value.replace('`', '')}"
    default = "" if setting.default is None else f"; default: {setting.default_text}"
    yield from _comment(setting.meaning)
    yield f"# {value}{default}"
    yield from _comment(remarks.get(name, ""))
    yield f"{name}: {flow(given[name])}" if name in given else f"#{name}: {setting.default_text}"


def _comment(text: str) -> list[str]:
    # Without YAML's rarer line breaks, too: another user may have named a cached model.
    words = printable(" ".join(text.split()))
    return [f"# {line}" for line in textwrap.wrap(words, _WIDTH - 4, break_on_hyphens=False)]
