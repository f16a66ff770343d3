"""The user's home folder, which a service or a container may not have."""

from __future__ import annotations

from pathlib import Path

from deploy.errors import ConfigError


def expanded(path: Path | str) -> Path:
    """Return a path with the home folder in the place of its `~`.

    Raises:
        ConfigError: it begins with `~`, HOME is not set, and the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"{path}: HOME is not set, and this user has no home folder", hint="set HOME"
        ) from exc
