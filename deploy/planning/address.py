"""Addresses as URLs have them."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """Return 'host:port', an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
