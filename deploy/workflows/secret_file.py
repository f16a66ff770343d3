"""Read a file in which the user keeps a secret."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import ConfigError


def read_secret_file(field: str, file: Path) -> str:
    """Return the text of the file that a field of the spec names.

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
