"""Which server has a key, and how to reach and log in to it.

Everything here that talks to a server may take seconds, or hang while a name is resolved:
`pool.Links` runs it in other threads. The server may be hostile or broken: redis-py, which logs in,
reads as much as a server announces, and restarts its timeout after every byte, so its socket has
limits here.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.protocol import Deadline, LinkBroken
from pdkit_connector.redis_url import SCHEMES, Node, parse_redis_url

ONLY: Node = ("", 0)
# Maps a key to its server.
Route = Callable[[bytes], Node]
_MASTER_KNOWN_S = 2.0
_SLOTS = 16384
# For asking servers in turn which has which keys, all together.
_ASK_S = 20.0


class RoutingTable(Protocol):
    """The servers behind an address; any thread may ask."""

    def route(self) -> Route | None:
        """Return the function that maps keys to servers; None if servers must be asked first."""
        ...

    def learn(self) -> Route:
        """Ask the servers which has which keys."""
        ...

    def connect(self, node: Node) -> Any:
        """Return a connected connection of redis-py."""
        ...

    def changed(self) -> None:
        """Note that a server has lost its role."""
        ...


def routing_table(address: Address) -> RoutingTable:
    """Return the routing table of an address."""
    if address.kind == "cluster":
        return Cluster(address)
    return SentinelMaster(address) if address.kind == "sentinel" else Single(address)


class Single:
    """One server, which has all keys."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def route(self) -> Route:
        return lambda key: ONLY  # noqa: ARG005 - there is but one

    def learn(self) -> Route:
        return self.route()

    def connect(self, node: Node) -> Any:  # noqa: ARG002 - there is but one
        return connected(self._address, ONLY)

    def changed(self) -> None:
        pass


class SentinelMaster:
    """The server that Sentinels call the master."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sentinels = replace(address, options=address.sentinel_options)
        self._master: Node | None = None
        self._asked_at = 0.0

    def route(self) -> Route | None:
        master = self._master
        if master is None:
            return None
        # After a failover, the old master accepts stores for some seconds, and then loses them.
        if time.monotonic() - self._asked_at > _MASTER_KNOWN_S:
            self._asked_at = math.inf  # one thread asks at a time
            threading.Thread(target=self._learn_again, daemon=True).start()
        return lambda key: master  # noqa: ARG005 - it has all keys

    def learn(self) -> Route:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.master)
        master: Node = _ask(self._sentinels, self._address.nodes, question, self._node)
        self._master = master
        return lambda key: master  # noqa: ARG005 - it has all keys

    def connect(self, node: Node) -> Any:
        return connected(self._address, node)

    def changed(self) -> None:
        self._master = None

    def _learn_again(self) -> None:
        with suppress(Exception):  # keep the known master as long as it works
            self.learn()
        self._asked_at = time.monotonic()

    def _node(self, answer: Any, _asked: Node) -> Node:
        if not answer:
            raise ConnectionError(f"Sentinel knows no master {self._address.master!r}")
        host, port = answer
        return _server(host.decode(), port)


class Cluster:
    """Servers that share the keys by hash slots."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._known = address.nodes
        self._by_slot: list[Node] = []  # empty until it is known; replaced, never changed

    def route(self) -> Route | None:
        return _route(self._by_slot) if self._by_slot else None

    def learn(self) -> Route:
        by_slot: list[Node] = _ask(self._address, self._known, ("CLUSTER", "SLOTS"), _by_slot)
        self._by_slot = by_slot
        # The servers in the URL may be gone one day.
        self._known = tuple(dict.fromkeys((*self._address.nodes, *by_slot)))
        return _route(by_slot)

    def connect(self, node: Node) -> Any:
        return connected(self._address, node)

    def changed(self) -> None:
        self._by_slot = []


def _ask(
    address: Address,
    nodes: Sequence[Node],
    question: tuple[str, ...],
    understood: Callable[[Any, Node], Any],
) -> Any:
    """Ask servers in turn, until one gives an answer that can be understood."""
    error: Exception = ConnectionError("no server was named")
    deadline = Deadline(_ASK_S)
    for node in nodes:
        if deadline.passed():
            break
        try:
            connection = logged_in(address, _where(node))
        except Exception as exc:  # noqa: BLE001 - the next may answer; the last one's is raised
            error = exc
            continue
        try:
            connection.send_command(*question)
            return understood(connection.read_response(), node)
        except Exception as exc:  # noqa: BLE001 - as above
            error = exc
        finally:
            connection.disconnect()
    raise error


def _route(by_slot: list[Node]) -> Route:
    from redis.crc import key_slot

    return lambda key: by_slot[key_slot(key)]


def _by_slot(ranges: Any, asked: Node) -> list[Node]:
    """Return the server of each of the 16,384 slots from what CLUSTER SLOTS answers."""
    nodes: list[Node | None] = [None] * _SLOTS
    for first, last, (host, port, *_), *_replicas in ranges:
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        if not 0 <= first <= last < _SLOTS or any(nodes[first : last + 1]):
            raise ConnectionError(f"the cluster names slots {first} to {last}, or names them twice")
        # An empty name means the server that was asked.
        nodes[first : last + 1] = [_server(name or asked[0], port)] * (last + 1 - first)
    missing = nodes.count(None)
    if missing:
        raise ConnectionError(f"the cluster serves {_SLOTS - missing} of {_SLOTS} slots")
    return [node for node in nodes if node is not None]


def _server(host: str, port: Any) -> Node:
    if not 0 < int(port) < 1 << 16:
        raise ConnectionError(f"{int(port)} is not a port")
    return host, int(port)


def _where(node: Node) -> dict[str, Any]:
    return {} if node == ONLY else {"host": node[0], "port": node[1]}


def connected(address: Address, node: Node) -> Any:
    """Return a connection that is made and logged in."""
    return plain(logged_in(address, _where(node)))


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


# Limit of each step of connecting: TCP, TLS, an answer.
CONNECT_S = 2.0
# Limit for all answers together.
LOGIN_S = 6.0
# The longest answer is that of CLUSTER SLOTS: about 200 bytes a range, and there are few.
REPLY_BYTES = 4 << 20


class LimitedSocket:
    """A socket that fails after a number of bytes or seconds."""

    def __init__(self, plain_or_tls: Any) -> None:
        self.inner = plain_or_tls
        self._left_bytes = REPLY_BYTES
        self._deadline = Deadline(LOGIN_S, CONNECT_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def recv(self, *args: Any) -> bytes:
        """Receive as a socket does."""
        self._limit()
        data: bytes = self.inner.recv(*args)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        """Receive as a socket does."""
        self._limit()
        count = int(self.inner.recv_into(*args))
        self._count(count)
        return count

    def _limit(self) -> None:
        self.inner.settimeout(self._deadline.call_s())

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise LinkBroken(f"more than {REPLY_BYTES} bytes before a value was asked for")


def logged_in(address: Address, where: dict[str, Any]) -> Any:
    """Return a connection that is open and logged in; redis-py by itself would retry."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    connection = address.connection_class(
        **{
            **address.options,
            **where,
            "socket_timeout": CONNECT_S,
            "socket_connect_timeout": CONNECT_S,
            "retry": Retry(NoBackoff(), 0),
            # Replies are read without redis-py, in the older form of the protocol.
            "protocol": 2,
        }
    )
    # The only place where redis-py creates a socket, before the log-in reads from it.
    make = connection._connect
    connection._connect = lambda: LimitedSocket(make())
    connection.connect()
    return connection


def plain(connection: Any) -> Any:
    """Return the connection without the limits, for a link, which has its own."""
    connection._sock = connection._sock.inner
    return connection
