"""The URL of a Redis: what it says, without asking anybody.

    redis://[user:password@]host:port[/db]      rediss:// for TLS      unix:///path?db=0
    redis-sentinel://[user:password@]host:port[,host:port...]/master[?db=0&sentinel_password=...]
    redis-cluster://[user:password@]host:port[,host:port...]

`rediss-sentinel` and `rediss-cluster` are those over TLS. The query has further options of
redis-py's connections, such as ssl_ca_certs=/path. The kit imports this module too, so that it
accepts exactly the URLs that the engines accept; it imports only the standard library.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

Node = tuple[str, int]
RedisKind = Literal["single", "sentinel", "cluster"]

SCHEMES: tuple[str, ...] = (
    "redis", "rediss", "unix",
    "redis-sentinel", "rediss-sentinel", "redis-cluster", "rediss-cluster",
)  # fmt: skip
# Options of the query that name files.
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_DEFAULT_PORT = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_LOCAL_NAMES = ("localhost", "ip6-localhost")


@dataclass(frozen=True)
class RedisUrl:
    """Where a Redis is.

    Attributes:
        nodes: servers to ask first; none where it is a socket.
        socket: path of a Unix socket.
        master: the name that Sentinels know the master by.
        files: what TLS reads, on the machine that connects.
        one_server: the URL of a single server with the same user, database and options.
        sentinel_options: for connections to Sentinels, beside those for TLS.
    """

    scheme: str
    kind: RedisKind
    nodes: tuple[Node, ...]
    socket: str
    master: str
    files: tuple[str, ...]
    one_server: str = field(repr=False)
    sentinel_options: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The URL without user, password and options."""
        if self.socket:
            return f"unix://{self.socket}"
        hosts = ",".join(_host_port(host, port) for host, port in self.nodes)
        return f"{self.scheme}://{hosts}" + (f"/{self.master}" if self.master else "")


def scheme_of(text: str) -> str:
    """Return the scheme of a URL; "" where it has none."""
    scheme, separator, _ = text.partition("://")
    return scheme if separator else ""


def parse_redis_url(text: str) -> RedisUrl:
    """Parse a URL.

    Raises:
        ValueError: it is broken, or of an unknown scheme. The message shows nothing of it, since it
            may hold a password.
    """
    if scheme_of(text) not in SCHEMES:
        raise ValueError("not a Redis URL")
    try:
        return _unix(text) if scheme_of(text) == "unix" else _network(text)
    except ValueError:
        raise ValueError("not a Redis URL") from None


def is_loopback(host: str) -> bool:
    """Tell whether a host means the machine, or the container, that asks."""
    if host in _LOCAL_NAMES or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def split_url(text: str) -> SplitResult:
    """Return a URL's parts; newer releases of Python refuse several hosts, one of them in brackets.

    Raises:
        ValueError: a bracket without its other.
    """
    scheme, _, rest = text.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    if netloc.count("[") != netloc.count("]"):
        raise ValueError
    return urlsplit(f"{scheme}://{rest[len(netloc) :]}")._replace(netloc=netloc)


def _unix(text: str) -> RedisUrl:
    parts = split_url(text)
    _refuse_stray(parts.path, parts.query, parts.fragment)
    path = unquote(parts.path)
    if not path.startswith("/") or parts.netloc.rpartition("@")[2]:
        raise ValueError
    return RedisUrl("unix", "single", (), path, "", (), text)


def _network(text: str) -> RedisUrl:
    parts = split_url(text)
    _refuse_stray(parts.path, parts.query, parts.fragment)
    base, _, many = parts.scheme.partition("-")
    kind: RedisKind = "sentinel" if many == "sentinel" else "cluster" if many else "single"
    userinfo, _, hosts = parts.netloc.rpartition("@")
    names = hosts.split(",") if kind != "single" else [hosts or "localhost"]
    nodes = tuple(_node(host, _DEFAULT_PORT[kind]) for host in names if host)
    master = unquote(parts.path.strip("/")) if kind == "sentinel" else ""
    if not nodes or (kind == "sentinel" and not master):
        raise ValueError
    query = dict(parse_qsl(parts.query))
    own = {name: query.pop(name) for name in _SENTINEL_OPTIONS if name in query}
    path = parts.path if kind == "single" else ""
    options = f"?{urlencode(query)}" if query else ""
    return RedisUrl(
        scheme=parts.scheme,
        kind=kind,
        nodes=nodes,
        socket="",
        master=master,
        files=tuple(query[name] for name in _FILE_OPTIONS if name in query),
        one_server=f"{base}://{userinfo}{'@' if userinfo else ''}{_host_port(*nodes[0])}"
        f"{path}{options}",
        sentinel_options={name.removeprefix("sentinel_"): value for name, value in own.items()},
    )


def _refuse_stray(path: str, query: str, fragment: str) -> None:
    """Refuse what a password with '/', '?' or '#' in it looks like, before a part of it is a host.

    Raises:
        ValueError: those characters, and '@', must be written as %XX.
    """
    if fragment or "@" in path or "@" in query:
        raise ValueError


def _node(text: str, default: int) -> Node:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(default)
    name = host.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError
    return name, int(port)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
