"""The address of a Redis: one server, a Sentinel's master, or a cluster.

    redis://[user:password@]host:port[/db]      rediss:// for TLS      unix:///path?db=0
    redis-sentinel://[user:password@]host:port[,host:port...]/master[?db=0&sentinel_password=...]
    redis-cluster://[user:password@]host:port[,host:port...]

`rediss-sentinel` and `rediss-cluster` are those over TLS. Further options of redis-py stand in the
query, such as ssl_ca_certs=/path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from pdkit_connector.errors import ConnectorError

Node = tuple[str, int]

_SCHEME = re.compile("[a-z-]{1,20}")
_DEFAULT_PORT = {"sentinel": 26379, "cluster": 6379}


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


def parse(url: str) -> Address:
    """Return what a URL says; raise ConnectorError, which shows no password, where it says nothing.

    Source of the single forms: redis-py's `parse_url`.
    """
    scheme, separator, _ = url.partition("://")
    base, _, kind = scheme.partition("-")
    known = {"": ("redis", "rediss", "unix"), "sentinel": ("redis", "rediss")}
    known["cluster"] = known["sentinel"]
    if not separator or base not in known.get(kind, ()):
        # Without a scheme, what stands first may be a password.
        shown = f"{scheme}://" if separator and _SCHEME.fullmatch(scheme) else "this"
        raise ConnectorError(
            f"{shown} is no address of a Redis; use redis://, rediss://, unix://, "
            "redis-sentinel:// or redis-cluster://"
        )
    try:
        return _several(url, base, kind) if kind else _single(url)
    except (ValueError, TypeError):
        # What they say may hold a part of the password.
        raise ConnectorError(
            f"the address of Redis ({scheme}://…) is broken: see to host, port, database, a "
            "Sentinel's /MASTER and the options of redis-py's connections after `?`; write a "
            "password's special characters as %XX"
        ) from None


def _single(url: str) -> Address:
    from redis.connection import Connection, parse_url
    from redis.exceptions import RedisError

    options = dict(parse_url(url))
    connection_class = options.pop("connection_class", Connection)
    try:
        connection_class(**options)  # connects to nothing
    except RedisError as exc:
        raise ValueError from exc
    return Address("single", (), "", options, {}, connection_class)


def split_url(url: str) -> SplitResult:
    """Return a URL's parts; newer releases of Python refuse several hosts, one of them in brackets.

    Raises:
        ValueError: a bracket without its other.
    """
    scheme, _, rest = url.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    if netloc.count("[") != netloc.count("]"):
        raise ValueError
    return urlsplit(f"{scheme}://{rest[len(netloc) :]}")._replace(netloc=netloc)


def _several(url: str, base: str, kind: str) -> Address:
    parts = split_url(url)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(host, _DEFAULT_PORT[kind]) for host in hosts.split(",") if host)
    if not nodes:
        raise ValueError
    query = dict(parse_qsl(parts.query))
    sentinel_options: dict[str, Any] = {
        name.removeprefix("sentinel_"): query.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in query
    }
    master = unquote(parts.path.strip("/"))
    if kind == "sentinel" and not master:
        raise ValueError
    # A single server's URL with the same user, database and options: redis-py reads the rest.
    host, port = nodes[0]
    single = f"{base}://{userinfo}{'@' if userinfo else ''}{_quoted(host)}:{port}"
    one = _single(single + (f"?{urlencode(query)}" if query else ""))
    options = {k: v for k, v in one.options.items() if k not in ("host", "port")}
    if base == "rediss":
        sentinel_options |= {k: v for k, v in options.items() if k.startswith("ssl")}
    return Address(kind, nodes, master, options, sentinel_options, one.connection_class)


def _node(host_port: str, default: int) -> Node:
    host, separator, port = host_port.rpartition(":")
    if not separator or host_port.endswith("]"):
        host, port = host_port, str(default)
    if not port.isdecimal():
        raise ValueError
    return host.strip("[]"), int(port)


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host
