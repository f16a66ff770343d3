"""Which server a key lies on, and how to reach it.

Everything here that talks to a server may take seconds, or hang while a name is looked up: `Links`
runs it aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pdkit_connector.redis_path.address import Address, Node

ONLY: Node = ("", 0)
# Tells which server a key lies on.
Route = Callable[[bytes], Node]

# Limit of each step on the way to a connection: to reach the server, TLS, to log in.
CONNECT_S = 2.0


class Topology(Protocol):
    """The servers behind an address; any thread may ask."""

    def route(self) -> Route | None:
        """Return the way to each key's server, or None where it must be learnt first."""
        ...

    def learn(self) -> Route:
        """Ask the servers who has which keys."""
        ...

    def connect(self, node: Node) -> Any:
        """Return a connected connection of redis-py."""
        ...

    def changed(self) -> None:
        """Learn that a server no longer plays the part it did."""
        ...


def topology(address: Address) -> Topology:
    """Return the topology of an address."""
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
        return connected(self._address, {})

    def changed(self) -> None:
        pass


class SentinelMaster(Single):
    """The server that Sentinels call the master, asked for anew at every connection."""

    def connect(self, node: Node) -> Any:  # noqa: ARG002 - Sentinels know it
        from redis.sentinel import Sentinel

        address = self._address
        sentinel = Sentinel(
            list(address.nodes),
            sentinel_kwargs={**address.sentinel_options, **_patience(), "socket_keepalive": False},
        )
        try:
            host, port = sentinel.discover_master(address.master)
        finally:
            for client in sentinel.sentinels:
                client.close()
        return connected(address, {"host": host, "port": port})


class Cluster:
    """Servers that share the keys by hash slots."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._known = address.nodes
        self._by_slot: list[Node] = []  # empty until it is known; replaced, never changed

    def route(self) -> Route | None:
        return _route(self._by_slot) if self._by_slot else None

    def learn(self) -> Route:
        by_slot = self._asked()
        self._by_slot = by_slot
        # Those that were named may be gone one day.
        self._known = tuple(dict.fromkeys((*self._address.nodes, *by_slot)))
        return _route(by_slot)

    def connect(self, node: Node) -> Any:
        host, port = node
        return connected(self._address, {"host": host, "port": port})

    def changed(self) -> None:
        self._by_slot = []

    def _asked(self) -> list[Node]:
        """Ask the servers that are known, in turn, who has which slots."""
        error: Exception = ConnectionError("no server of the cluster was named")
        for node in self._known:
            try:
                connection = self.connect(node)
            except Exception as exc:  # noqa: BLE001 - the next may answer; the last one's is raised
                error = exc
                continue
            try:
                connection.send_command("CLUSTER", "SLOTS")
                return _by_slot(connection.read_response(), node[0])
            except Exception as exc:  # noqa: BLE001 - as above
                error = exc
            finally:
                connection.disconnect()
        raise error


def _route(by_slot: list[Node]) -> Route:
    from redis.crc import key_slot

    return lambda key: by_slot[key_slot(key)]


def _by_slot(ranges: Any, asked: str) -> list[Node]:
    """Return the server of each of the 16,384 slots from what CLUSTER SLOTS answers."""
    nodes: list[Node | None] = [None] * 16384
    for first, last, (host, port, *_), *_replicas in ranges:
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        # A server that does not know its own name means the one that was asked.
        nodes[int(first) : int(last) + 1] = [(name or asked, int(port))] * (
            int(last) + 1 - int(first)
        )
    missing = nodes.count(None)
    if missing:
        raise ConnectionError(f"the cluster serves {16384 - missing} of 16384 slots")
    return [node for node in nodes if node is not None]


def connected(address: Address, where: dict[str, Any]) -> Any:
    """Return a connection that is made and logged in."""
    connection = address.connection_class(
        # Replies are read without redis-py, in the older form of the protocol.
        **{**address.options, **where, **_patience(), "protocol": 2}
    )
    connection.connect()
    return connection


def _patience() -> dict[str, Any]:
    """Return limits for redis-py, which by itself would try again for many seconds."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": CONNECT_S,
        "socket_connect_timeout": CONNECT_S,
        "retry": Retry(NoBackoff(), 0),
    }
