"""Errors in the terms of the command that was typed: its options, its command, its origins."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from deploy.errors import HELP, Changes, PdkitError

# The commands that take all stack options.
_PLANNING = ("up", "plan", "render", "doctor", "export kubernetes", "bench sweep")


def not_a_number(exc: Any, arguments: Sequence[str]) -> str:
    """Return the error for an option that needs a whole number; "" for other errors.

    Typer's own words differ by its release, and only some show the value.
    """
    param: Any = getattr(exc, "param", None)
    if param is None or not _takes_whole_numbers(param, exc.__cause__):
        return ""
    given = _given(param.opts, arguments)
    with suppress(ValueError):
        int(given)
        return ""  # it is out of the range, which typer says
    names = " / ".join(f"'{name}'" for name in param.opts)
    return f"invalid value '{given}' for {names}: expected a whole number"


def _takes_whole_numbers(param: Any, cause: Any) -> bool:
    """Ask click's type, which older releases of typer have, or the error of pydantic."""
    if errors := getattr(cause, "errors", None):
        return bool(errors()[0]["type"] == "int_parsing")
    return getattr(getattr(param, "type", None), "name", "") in ("integer", "integer range")


def _given(options: Sequence[str], arguments: Sequence[str]) -> str:
    given = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        option, has_value, value = argument.partition("=")
        if option in options:
            given = value if has_value else following
    return given


def fitted_hint(error: PdkitError, arguments: Sequence[str], command: str) -> str:
    """Return an error's hint as the typed command with only the needed changes."""
    if error.otherwise == HELP:
        return error.hint_for(command)
    # Every command that can ask for -f takes it.
    only_file = all(set(changes) == {"-f"} for changes in error.retry)
    if not error.retry or not (command in _PLANNING or only_file):
        return error.hint
    return error.hint_by([_changed(arguments, changes) for changes in error.retry])


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
    """Name settings in errors the way the user set them: by flag, variable or key of a file."""
    try:
        yield
    except PdkitError as exc:
        exc.name_origins(origins)
        raise
