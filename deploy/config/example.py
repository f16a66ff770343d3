"""A complete, commented deploy.yaml: every setting with its meaning, its values and its default."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.config.settings import SettingGroup, SpecSetting, flow, groups_of
from deploy.config.spec import StackSpec
from deploy.errors import printable

_WIDTH = 100
_HEAD = """\
# A stack of pdkit: all settings, with their meanings, values and defaults. To change one, remove
# the '#' in front of it and edit the value. Show the result with: deploy plan
# Command-line options and PDKIT_* variables take precedence over this file.
"""


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
