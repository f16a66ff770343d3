"""The user's home folder, which a service or a container may lack, and the hub's folders in it."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.errors import ConfigError


def expanded(path: Path | str) -> Path:
    """Return a path with its leading `~` replaced by the home folder.

    Raises:
        ConfigError: it begins with `~`, HOME is not set, and the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(
            f"{path}: HOME is not set, and this user has no home folder", hint="set HOME"
        ) from exc


def default_hub_cache() -> Path:
    """Return the Hugging Face cache folder of this machine, as huggingface_hub finds it."""
    return expanded(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub").absolute()


def default_hub_token() -> Path:
    """Return the file in which huggingface_hub keeps the user's token."""
    return expanded(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token").absolute()


def _hub_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.environ.get("HF_HOME") or Path(caches) / "huggingface")
