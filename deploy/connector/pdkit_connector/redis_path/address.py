"""The address of a Redis, as redis-py's connections take it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_url import SCHEMES, Node, parse_redis_url

_SCHEME = re.compile("[a-z-]{1,20}")


@dataclass(frozen=True)
class Address:
    """Where Redis is.

    Attributes:
        kind: single, sentinel or cluster.
        nodes: servers to ask first; empty for a single one.
        master: the name that Sentinels know the master by.
        options: arguments of redis-py's connections; they may hold a password.
        connection_class: redis-py's, for TLS and Unix sockets.
    """

    kind: str
    nodes: tuple[Node, ...] = ()
    master: str = ""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    connection_class: Any = None


def parse(text: str) -> Address:
    """Return the address in a URL; raise ConnectorError, which shows no password, if there is none.

    Source of the options: redis-py's `parse_url`.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme not in SCHEMES:
        # Without a scheme, the first part may be a password.
        shown = f"{scheme}://" if separator and _SCHEME.fullmatch(scheme) else "this"
        raise ConnectorError(
            f"{shown} is not a Redis address; use redis://, rediss://, unix://, "
            "redis-sentinel:// or redis-cluster://"
        )
    try:
        return _address(text)
    except (ValueError, TypeError):
        # Their messages may contain a part of the password.
        raise ConnectorError(
            f"the address of Redis ({scheme}://…) is broken: check host, port, database, a "
            "Sentinel's /MASTER and the options of redis-py's connections after `?`; write a "
            "password's special characters as %XX"
        ) from None


def _address(text: str) -> Address:
    url = parse_redis_url(text)
    options, connection_class = _connection(url.one_server)
    if url.kind == "single":
        return Address("single", (), "", options, {}, connection_class)
    options = {k: v for k, v in options.items() if k not in ("host", "port")}
    sentinel_options: dict[str, Any] = dict(url.sentinel_options)
    if url.scheme.startswith("rediss"):
        sentinel_options |= {k: v for k, v in options.items() if k.startswith("ssl")}
    return Address(url.kind, url.nodes, url.master, options, sentinel_options, connection_class)


def _connection(url: str) -> tuple[dict[str, Any], Any]:
    """Return the options and the class of the connections to a single server."""
    from redis.connection import Connection, parse_url
    from redis.exceptions import RedisError

    options = dict(parse_url(url))
    connection_class = options.pop("connection_class", Connection)
    try:
        connection_class(**options)  # connects to nothing
    except RedisError as exc:
        raise ValueError from exc
    return options, connection_class
