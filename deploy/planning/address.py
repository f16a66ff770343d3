"""Addresses in the form that URLs need."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import SettledSpec
from deploy.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """Return 'host:port', an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_collector(spec: SettledSpec) -> None:
    """Refuse a collector for traces that containers cannot reach.

    Raises:
        ConfigError: it is on a loopback address.
    """
    endpoint = spec.tracing.otlp_endpoint
    if not RUNTIMES[spec.runtime].own_network or not endpoint:
        return
    host = urlsplit(endpoint).hostname or ""
    if is_loopback(host):
        raise ConfigError(
            f"in a container, {endpoint} is the container itself",
            setting="tracing.otlp_endpoint",
            hint="use an address of this machine that containers can reach, such as "
            f"http://172.17.0.1:{urlsplit(endpoint).port}, or --runtime process",
        )


def collector_port(spec: SettledSpec) -> int | None:
    """Return the port of the collector for traces, None if none is named."""
    return urlsplit(spec.tracing.otlp_endpoint or "").port


def is_loopback(host: str) -> bool:
    """Tell whether a host of a URL is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def check_bind(spec: SettledSpec) -> None:
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
