"""An error in the words of the command line that met it: its options, its command, its origins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from deploy.errors import Changes, PdkitError

# The commands that take all stack options.
_PLANNING = ("up", "plan", "render", "doctor")
_OPTION = re.compile(r"--(?P<option>[a-z][a-z-]*)")
# A field at the beginning, such as 'bind:' or 'redis.memory_gib:', and no service, as in 'redis:'.
_HEAD = re.compile(r"(?!(?:redis|router):)(?P<field>[a-z][a-z_]*)(?=:|\.[a-zA-Z_]+[.:])")

# What typer says of a text where a number is meant; which text that is, only some releases say.
_NO_WHOLE = re.compile(r"Invalid value for (?P<options>'[^:]+'): .*valid integer.*")


def in_own_words(line: str, arguments: Sequence[str]) -> str:
    """Return a line of typer's on a wrong option, in the kit's words where it speaks in riddles."""
    found = _NO_WHOLE.fullmatch(line)
    if found is None:
        return line
    options = re.findall(r"'(-[^']+)'", found["options"])
    given = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        option, _, value = argument.partition("=")
        if option in options:
            given = value or following
    return f"invalid value '{given}' for {found['options']}: a whole number is expected"


def fitted_hint(error: PdkitError, arguments: Sequence[str], command: str) -> str:
    """Return the hint of an error, as a command that keeps what was typed and changes the rest."""
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
    """Let errors name settings as the user wrote them: a flag, a variable, or a key of a file.

    `origins` is field → '--field', 'PDKIT_FIELD' or the path of a file.
    """
    try:
        yield
    except PdkitError as exc:
        exc.message = named_by_origin(exc.message, origins)
        raise


def named_by_origin(message: str, origins: Mapping[str, str]) -> str:
    """Return a message in which options and fields are called what the user called them."""

    def called(found: re.Match[str]) -> str:
        field = found["option"].replace("-", "_")
        origin = origins.get(field, found[0])
        if origin.startswith(("--", "PDKIT_")):
            return origin
        return f"{origin}: {field}" if found.start() == 0 else field

    head = _HEAD.match(message)
    if head and head["field"] in origins:
        origin = origins[head["field"]]
        # Nested settings are of files only.
        said = origin if origin.startswith(("--", "PDKIT_")) else f"{origin}: {head['field']}"
        return said + message[head.end() :]
    return _OPTION.sub(called, message)
