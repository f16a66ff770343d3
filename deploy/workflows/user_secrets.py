"""The user's secrets: hub token, API key for clients, key of engines on several hosts."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.home_folder import default_hub_token
from deploy.runtime.secrets import read_secret_file


def hub_token(spec: StackSpec) -> str | None:
    """Return the user's token of the hub: from the named file, HF_TOKEN, or where its client
    keeps it.

    Raises:
        ConfigError: the named file cannot be read.
    """
    if spec.hf_token_file:
        return read_secret_file("hf_token_file", spec.hf_token_file)
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"]
    file = default_hub_token()
    return (file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None


def api_key(spec: StackSpec) -> str | None:
    """Return the key that clients must bring, or None if they need none."""
    return _key("api_key_file", spec.api_key_file)


def engine_key(spec: StackSpec) -> str | None:
    """Return the key that engines of all hosts ask for; None if one is made."""
    return _key("engine.key_file", spec.engine.key_file)


def _key(setting: str, file: Path | None) -> str | None:
    """Return the key in a file.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if file is None:
        return None
    key = read_secret_file(setting, file)
    if not key.isascii() or len(key.split()) != 1:
        raise ConfigError(
            f"{file} does not hold one key of letters and digits",
            setting=setting,
            hint=f"openssl rand -hex 32 > {file}",
        )
    return key
