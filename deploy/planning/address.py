"""Addresses in the form that URLs need."""

from __future__ import annotations

import ipaddress

from deploy.config.spec import StackSpec
from deploy.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """Return 'host:port', an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_bind(spec: StackSpec) -> None:
    """Refuse to serve other machines without a key, unless the user allows it.

    Raises:
        ConfigError: `bind` is not a loopback address.
    """
    keyless = spec.api_key_file is None and not spec.allow_keyless
    if keyless and not ipaddress.ip_address(spec.bind).is_loopback:
        raise ConfigError(
            f"{spec.bind} lets other machines use the stack, and no API key is set",
            setting="bind",
            hint="add --api-key-file FILE, or --allow-keyless to accept everyone who reaches it",
        )
