"""Errors in the terms of the command that was typed: its options, its command, its origins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from deploy.errors import Changes, PdkitError

# The commands that take all stack options.
_PLANNING = ("up", "plan", "render", "doctor")
_OPTION = re.compile(r"--(?P<option>[a-z][a-z-]*)")
# A field at the start, such as 'bind:' or 'redis.memory_gib:', but not a service such as 'redis:'.
_HEAD = re.compile(r"(?!(?:redis|router):)(?P<field>[a-z][a-z_]*)(?=:|\.[a-zA-Z_]+[.:])")

# Typer's message for text in place of a number; only some releases include the text.
_NO_WHOLE = re.compile(r"Invalid value for (?P<options>'[^:]+'): .*valid integer.*")


def in_own_words(line: str, arguments: Sequence[str]) -> str:
    """Return typer's message about a wrong option, reworded where it is unclear."""
    found = _NO_WHOLE.fullmatch(line)
    if found is None:
        return line
    options = re.findall(r"'(-[^']+)'", found["options"])
    given = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        option, _, value = argument.partition("=")
        if option in options:
            given = value or following
    return f"invalid value '{given}' for {found['options']}: expected a whole number"


def fitted_hint(error: PdkitError, arguments: Sequence[str], command: str) -> str:
    """Return an error's hint as the typed command with only the needed changes."""
    if command not in _PLANNING:
        return error.hint.replace("deploy plan --help", f"deploy {command} --help")
    commands = [_changed(arguments, changes) for changes in error.retry]
    # Only plan and render take an inventory.
    other = re.sub(r"deploy plan (?=--(?!inventory))", f"deploy {command} ", error.otherwise)
    return ", or ".join((*commands, *filter(None, [other])))


def _changed(arguments: Sequence[str], changes: Changes) -> str:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, has_value, _ = argument.partition("=")
        if option in changes:
            if not has_value:
                next(rest, None)
        elif argument != "--json":
            kept.append(argument)
    set_ = [part for option, value in changes.items() if value for part in (option, value)]
    return shlex.join(("deploy", *kept, *set_))


@contextmanager
def naming_origins(origins: Mapping[str, str]) -> Iterator[None]:
    """Name settings in errors the way the user set them: by flag, variable or key of a file.

    `origins` is field → '--field', 'PDKIT_FIELD' or the path of a file.
    """
    try:
        yield
    except PdkitError as exc:
        exc.message = named_by_origin(exc.message, origins)
        raise


def named_by_origin(message: str, origins: Mapping[str, str]) -> str:
    """Return the message with options and fields named the way the user set them."""

    def called(found: re.Match[str]) -> str:
        field = found["option"].replace("-", "_")
        origin = origins.get(field, found[0])
        if origin.startswith(("--", "PDKIT_")):
            return origin
        return f"{origin}: {field}" if found.start() == 0 else field

    head = _HEAD.match(message)
    if head and head["field"] in origins:
        origin = origins[head["field"]]
        # Nested settings come from files only.
        said = origin if origin.startswith(("--", "PDKIT_")) else f"{origin}: {head['field']}"
        return said + message[head.end() :]
    return _OPTION.sub(called, message)
