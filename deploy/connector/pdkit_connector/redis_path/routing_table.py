"""Which server has a key, and how to reach it.

Everything here that talks to a server may take seconds, or hang while a name is resolved: `Links`
runs it in other threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from pdkit_connector.redis_path.address import Address
from pdkit_connector.redis_path.link import Deadline
from pdkit_connector.redis_path.login import logged_in, plain
from pdkit_connector.redis_url import Node

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
        """Return what maps keys to servers, or None if the servers must be asked first."""
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
