"""Look up names in a cluster's DNS."""

from __future__ import annotations

import socket


def addresses(host: str, port: int) -> list[tuple[str, int]]:
    """Return the IPv4 addresses of a name, each with the port; none where it is unknown."""
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({(str(address[0]), port) for *_, address in found})
