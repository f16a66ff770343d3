"""Golden documents: few are whole, the others differences from one of them or from each other.

A golden with a `base` holds under `differs` what is other than there:

    key: value              another value, or a new one
    key: {$removed: true}   not in this document
    key: {$like: other}     a new value: a copy of the base's `other`, named `key`, then changed
    --option: value         in a list of arguments; `$after` names the argument before a new one
    line 3: text            in a text of several lines
    2: value                in any other list
    key: {$is: value}       another mapping as a whole

`differences` and `applied` are inverse: nothing of a document is lost.
"""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
_REMOVED = {"$removed": True}
_SAME = object()


def read(text: str) -> Any:
    """Return what a document says; by libyaml, where it is, in a tenth of the time."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe one


def load(file: Path) -> Any:
    """Return the document of a golden, its differences applied to its base.

    A folder is one document, whose keys are in several files.
    """
    if file.is_dir():
        return {key: value for part in sorted(file.iterdir()) for key, value in load(part).items()}
    document = read(file.read_text(encoding="utf-8"))
    if set(document) != {"base", "differs"}:
        return document
    return applied(load(REPO / document["base"]), document["differs"])


def golden_text(base: str, document: Any) -> str:
    """Return the text of a golden that differs from the one at `base`, a path in the checkout."""
    new = read(yaml.safe_dump(document))
    change = differences(load(REPO / base), new)
    assert applied(load(REPO / base), change) == new
    return yaml.safe_dump({"base": base, "differs": change}, sort_keys=False, width=110)


def differences(base: Any, new: Any) -> Any:
    """Return what makes `new` of `base` by `applied`."""
    found = _differences(base, new)
    return {} if found is _SAME else found


def applied(base: Any, change: Any) -> Any:
    """Return `base` with the differences of a golden."""
    if not isinstance(change, dict):
        return change
    if "$is" in change:
        return change["$is"]
    if isinstance(base, str):
        return _with_lines(base, change)
    if isinstance(base, list):
        if all(isinstance(at, int) for at in change):
            return [
                applied(one, change[at]) if at in change else one for at, one in enumerate(base)
            ]
        return _with_options(base, change)
    return _with_keys(base, change)


def _differences(base: Any, new: Any) -> Any:
    if base == new:
        return _SAME
    for kind, compare in ((dict, _keys), (list, _items), (str, _lines)):
        if isinstance(base, kind) and isinstance(new, kind):
            found = compare(base, new)
            if found is not None and applied(base, found) == new:
                return found
    return {"$is": new} if isinstance(new, dict) else new


# Mappings.


def _keys(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in new.items():
        if key not in base:
            found[key] = _new_key(base, key, value)
        elif (change := _differences(base[key], value)) is not _SAME:
            found[key] = change
    return found | {key: dict(_REMOVED) for key in base if key not in new}


def _new_key(base: dict[str, Any], key: str, value: Any) -> Any:
    like = _like(base, key)
    if like is not None:
        change = _differences(_renamed(base[like], like, key), value)
        if change is _SAME:
            return {"$like": like}
        if isinstance(change, dict) and "$is" not in change:
            return {"$like": like, **change}
    return {"$is": value} if isinstance(value, dict) else value


def _like(base: dict[str, Any], key: str) -> str | None:
    """Return the key of the base that is most like a new one, such as producer-0 for producer-1."""
    known = [name for name, value in base.items() if isinstance(value, dict | str)]
    for wanted in (key, key.replace("engine-", "producer-")):
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
        if near:
            return near[0]
    return None


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_renamed(one, old, new) for one in value]
    if isinstance(value, dict):
        return {_renamed(key, old, new): _renamed(one, old, new) for key, one in value.items()}
    return value


def _with_keys(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(base)
    for key, one in change.items():
        if one == _REMOVED:
            del made[key]
        elif isinstance(one, dict) and "$like" in one:
            rest = {name: value for name, value in one.items() if name != "$like"}
            copied = _renamed(base[one["$like"]], one["$like"], key)
            made[key] = applied(copied, rest) if rest else copied
        else:
            made[key] = applied(made.get(key), one)
    return made


# Lists, and among them arguments: their options are named instead of counted.


def _items(base: list[Any], new: list[Any]) -> dict[Any, Any] | None:
    if _is_argv(base) and _is_argv(new):
        return _options(base, new)
    if len(base) != len(new):
        return None
    pairs = enumerate(zip(base, new, strict=True))
    changes = {at: _differences(one, other) for at, (one, other) in pairs}
    return {at: change for at, change in changes.items() if change is not _SAME}


def _is_argv(value: list[Any]) -> bool:
    return "-m" in value and any(str(one).startswith("--") for one in value)


def _by_option(argv: list[str]) -> dict[str, list[str]]:
    """Return each option with the values behind it; "" is what comes before the first."""
    groups: dict[str, list[str]] = {"": []}
    name = ""
    for word in argv:
        if word.startswith("-") and word not in groups:
            name = word
            groups[name] = []
        else:
            groups[name].append(word)
    return groups


def _options(base: list[str], new: list[str]) -> dict[str, Any]:
    was, now = _by_option(base), _by_option(new)
    found: dict[str, Any] = {}
    before = ""
    for name, values in now.items():
        if name not in was:
            found[name] = {"$after": before, "values": values}
        elif values != was[name]:
            found[name] = values
        before = name
    return found | {name: dict(_REMOVED) for name in was if name not in now}


def _with_options(base: list[str], change: dict[str, Any]) -> list[str]:
    groups = list(_by_option(base).items())
    for name, one in change.items():
        names = [known for known, _ in groups]
        if one == _REMOVED:
            groups.pop(names.index(name))
        elif isinstance(one, dict):
            groups.insert(names.index(one["$after"]) + 1, (name, one["values"]))
        else:
            groups[names.index(name)] = (name, one)
    return [word for name, values in groups for word in (name, *values) if word]


# Texts of several lines.


def _lines(base: str, new: str) -> dict[str, str] | None:
    was, now = base.split("\n"), new.split("\n")
    if len(was) < 3 or len(was) != len(now):
        return None
    pairs = enumerate(zip(was, now, strict=True), 1)
    return {f"line {at}": line for at, (old, line) in pairs if old != line}


def _with_lines(base: str, change: dict[str, str]) -> str:
    lines = base.split("\n")
    for name, line in change.items():
        lines[int(name.removeprefix("line ")) - 1] = line
    return "\n".join(lines)
