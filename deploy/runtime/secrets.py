"""Secrets of a stack: made once, kept in files only their owner reads, never shown."""

from __future__ import annotations

import re
import secrets as random_source
from collections.abc import Mapping
from pathlib import Path

from deploy.errors import ConfigError, StateError
from deploy.runtime.home import write_private
from deploy.runtime.own_files import read_text

_PLACEHOLDER = re.compile(r"@\{(\w+)\}")


class Secret:
    """A value that `repr`, `str` and formatting do not show."""

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the secret itself, to be passed on and never shown."""
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    __str__ = __repr__


def ensure_secrets(folder: Path, names: tuple[str, ...]) -> dict[str, Secret]:
    """Return the secrets of those names, made and written where they are not there yet.

    Raises:
        StateError: one is there and cannot be read.
    """
    return {name: _read(folder / name) or _make(folder / name) for name in names}


def keep_secret(folder: Path, name: str, value: str) -> None:
    """Write a secret that the user supplied."""
    write_private(folder / name, value.strip() + "\n")


def read_secrets(folder: Path, names: tuple[str, ...]) -> dict[str, Secret]:
    """Return the secrets that are there; a missing one is left out.

    Raises:
        StateError: one is there and cannot be read.
    """
    found = {name: _read(folder / name) for name in names}
    return {name: secret for name, secret in found.items() if secret}


def read_secret_file(field: str, file: Path) -> str:
    """Return the text of the user's own file that a field of the spec names.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    hint = f"name a file that holds it, or leave {field} out"
    if file.exists() and not file.is_file():  # a pipe would keep its reader waiting
        raise ConfigError(f"{file} is not a regular file", setting=field, hint=hint)
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(f"{file} cannot be read: {why}", setting=field, hint=hint) from exc
    if not text:
        raise ConfigError(f"{file} is empty", setting=field, hint=f"fill it, or leave {field} out")
    return text


def fill_in(text: str, secrets: Mapping[str, Secret]) -> str:
    """Replace every `@{name}` by that secret; KeyError for a name that is not among them."""
    return _PLACEHOLDER.sub(lambda match: secrets[match[1]].reveal(), text)


def _read(path: Path) -> Secret | None:
    try:
        value = read_text(path).strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise StateError(
            f"the secret {path} cannot be read: {why}",
            hint="deploy down, which removes it with the stack; then deploy up",
        ) from exc
    return Secret(value) if value else None


def _make(path: Path) -> Secret:
    # URL-safe, since it becomes part of a redis:// URL.
    secret = Secret(random_source.token_urlsafe(32))
    write_private(path, secret.reveal() + "\n")
    return secret
