"""The Redis path's settings, from `extra_config` of LMCache's configuration or a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkit_connector.errors import ConnectorError

_SETTING = "pdkit."

# Why the plug-in could not be created. LMCache only logs this, and continues without a store.
failures: list[str] = []


@dataclass(frozen=True)
class Limits:
    """Limits of a client; the kit's plan sets those in seconds.

    Attributes:
        lookup_s: seconds after which a lookup is a miss.
        load_s: seconds after which the rest of a load is a miss.
        store_s: seconds after which storing a chunk is given up.
        silent_s: a load or store fails after this many seconds without a byte.
        load_lanes, store_lanes: connections for values in each direction; at least one per shard.
    """

    lookup_s: float = 0.5
    load_s: float = 60.0
    store_s: float = 60.0
    silent_s: float = 5.0
    load_lanes: int = 2
    store_lanes: int = 2


def read_settings(config: Any) -> dict[str, Any]:
    """Return the `pdkit.` settings of LMCache's configuration, without that prefix."""
    return _own(config.extra_config or {})


def settings_in(file: Path) -> dict[str, Any]:
    """Return the `pdkit.` settings of a YAML file, without that prefix.

    Raises:
        ConnectorError: it cannot be read, or is not such a file.
    """
    import yaml  # fixes are listed without any package

    try:
        read = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as exc:
        # A parser's message may show a part of a password.
        raise ConnectorError(f"{file} cannot be read ({type(exc).__name__})") from None
    if not isinstance(read, dict):
        raise ConnectorError(f"{file} has no settings")
    return _own(read)


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(_SETTING): value
        for name, value in settings.items()
        if name.startswith(_SETTING)
    }


def urls_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the addresses of Redis.

    Raises:
        ConnectorError: there is none.
    """
    url = required(settings, "url")
    return [str(one) for one in url] if isinstance(url, list) else [str(url)]


def secret_of(settings: dict[str, Any]) -> bytes:
    """Return the secret that values are signed with; b"" without one.

    Raises:
        ConnectorError: its file cannot be read, or is empty.
    """
    if "mac_key_file" not in settings:
        return b""
    file = Path(str(settings["mac_key_file"]))
    try:
        secret = file.read_bytes().strip()
    except OSError as exc:
        raise ConnectorError(f"{_SETTING}mac_key_file: {file} cannot be read ({exc})") from exc
    if not secret:
        raise ConnectorError(f"{_SETTING}mac_key_file: {file} is empty")
    return secret


def required(settings: Mapping[str, Any], name: str) -> Any:
    """Return a setting.

    Raises:
        ConnectorError: it is missing or empty.
    """
    if not settings.get(name):
        raise ConnectorError(f"LMCache's configuration has no {_SETTING}{name}")
    return settings[name]


def limits_of(settings: dict[str, Any]) -> Limits:
    """Return the client's limits; those that are not set have their defaults.

    Raises:
        ConnectorError: a setting is unknown.
    """
    known = {name: type(value) for name, value in dataclasses.asdict(Limits()).items()}
    given = {name: kind(settings[name]) for name, kind in known.items() if name in settings}
    if unknown := sorted(set(settings) - set(known) - {"url", "namespace", "mac_key_file"}):
        raise ConnectorError(
            f"LMCache's configuration has an unknown {_SETTING}{unknown[0]}; "
            f"known: {', '.join(sorted(known))}"
        )
    return Limits(**given)
