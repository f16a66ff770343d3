"""The user's own Redis, by its URL: one server, a Sentinel's master, or a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.connector.pdkit_connector.redis_url import Node, RedisUrl
from deploy.metrics.store_stats import StoreStats, combined
from deploy.planning.redis_memory import RedisMemory
from deploy.runtime.redis_client import (
    NOT_OF_REDIS,
    bounded,
    errors,
    if_allowed,
    limits,
    new_client,
    refusal_of,
    scan_of,
    server_stats,
)
from deploy.runtime.store import Refusal, key_pages, marked_keys, with_twins

if TYPE_CHECKING:
    from deploy.doctor.observed import RedisSeen


@dataclass(frozen=True)
class FoundKeys:
    """The number of keys with a prefix; a lower bound if not `all_seen`."""

    count: int
    all_seen: bool


class UrlStore:
    """Connections to all servers that have keys: the server, the master, or a cluster's masters.

    The servers are looked up each time, since a failover may have changed them.
    """

    def __init__(self, url: RedisUrl) -> None:
        """Connect to nothing yet.

        Raises:
            ValueError: an option that redis-py does not know, or a value that it does not take.
        """
        import redis
        from redis.connection import Connection, parse_url

        self._url = url
        self._errors = errors()
        self._denied = redis.exceptions.NoPermissionError
        self._refused = redis.exceptions.AuthenticationError
        try:
            self._options: dict[str, Any] = {**parse_url(url.one_server), **limits()}
            self._class: Any = bounded(self._options.pop("connection_class", Connection))
            self._class(**self._options)
        except (TypeError, ValueError, redis.RedisError):
            # Their text may contain a part of the password.
            raise ValueError("not a Redis URL") from None
        tls = {name: value for name, value in self._options.items() if name.startswith("ssl")}
        self._to_sentinels = {**tls, **url.sentinel_options, **limits()}
        self._clients: dict[tuple[Node | None, bool], Any] = {}

    def trouble(self) -> str:
        """Return why Redis cannot be used, in its own words; "" if all servers answer."""
        try:
            for client in self._servers():
                self._ping(client)
        except self._errors as exc:
            return self.said(exc)
        return ""

    def refusal(self) -> Refusal | None:
        """Return what a server says instead of serving; None if all serve, or say nothing."""
        try:
            found = [refusal_of(client) for client in self._servers()]
        except self._errors as exc:
            found = [Refusal(self.said(exc), True)] if isinstance(exc, self._refused) else []
        return next(filter(None, found), None)

    def server_names(self) -> tuple[str, ...]:
        """Return the hosts that engines will connect to; none for a Unix socket.

        Raises:
            RedisError, OSError: no server answered.
        """
        return tuple(host for host, _ in self._nodes())

    def stats(self) -> StoreStats | None:
        """Return a reading, of a cluster the sums, or None if a server does not answer."""
        try:
            return combined([server_stats(client) for client in self._servers()])
        except self._errors:
            return None

    def settings(self) -> tuple[RedisSeen, ...]:
        """Return what this client's user may see of each server.

        Raises:
            RedisError, OSError: one does not answer, or does not let the user in.
        """
        return tuple(_settings(client) for client in self._servers())

    def count_keys(self, prefix: str, *, within_s: float) -> FoundKeys:
        """Count the keys that begin with a prefix of letters, digits, ':', '-' and '_'.

        Raises:
            RedisError, OSError: it does not answer, or refuses the command.
        """
        ends, count = time.monotonic() + within_s, 0
        for _, keys in self._scanned(prefix):
            count += len(keys)
            if time.monotonic() > ends:
                return FoundKeys(count, all_seen=False)
        return FoundKeys(count, all_seen=True)

    def remove_keys(self, prefix: str) -> int:
        """Remove the keys that begin with a prefix; return how many that were.

        Raises:
            RedisError, OSError: it does not answer, or refuses the command.
        """
        removed = 0
        for client, keys in self._scanned(prefix):
            pipe = client.pipeline(transaction=False)
            for key in keys:  # one by one: in a cluster they are in different slots
                pipe.unlink(key)
            removed += sum(pipe.execute()) if keys else 0
        return removed

    def count_marked(self, mark: str) -> int | None:
        """Return how many keys contain a mark; None if its user may not see it."""
        try:
            return sum(len(marked_keys(scan_of(client), mark)) for client in self._servers())
        except self._errors:
            return None

    def remove_marked(self, mark: str) -> int | None:
        """Remove marked keys and their twins (see `Store`); None if its user may not."""
        try:
            return sum(
                self._unlink(with_twins(marked_keys(scan_of(client), mark), mark))
                for client in self._servers()
            )
        except self._errors:
            return None

    def _unlink(self, keys: list[bytes]) -> int:
        """Remove keys one by one: in a cluster they are on different servers."""
        removed = 0
        for client in self._servers():
            pipe = client.pipeline(transaction=False)
            for key in keys:
                pipe.unlink(key)
            answers = pipe.execute(raise_on_error=False)
            removed += sum(answer for answer in answers if isinstance(answer, int))
        return removed

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What questions may raise."""
        return self._errors

    def said(self, error: Exception) -> str:
        """Return what an error says, without the password."""
        if isinstance(error, NOT_OF_REDIS):
            return "it does not answer like a Redis server"
        text = str(error) or type(error).__name__
        for options in (self._options, self._to_sentinels):
            if secret := options.get("password"):
                text = text.replace(str(secret), "***")
        return text

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _scanned(self, prefix: str) -> Iterator[tuple[Any, list[bytes]]]:
        for client in self._servers():
            for keys in key_pages(scan_of(client), f"{prefix}*"):
                yield client, keys

    def _ping(self, client: Any) -> None:
        # A user who may store and load need not be allowed to ping.
        with suppress(self._denied):
            client.ping()

    def _servers(self) -> list[Any]:
        if self._url.kind == "single":
            return [self._client(None)]
        return [self._client(node) for node in self._nodes()]

    def _nodes(self) -> Sequence[Node]:
        if self._url.kind == "sentinel":
            return (self._asked(self._master, sentinels=True),)
        if self._url.kind == "cluster":
            found: Sequence[Node] = self._asked(self._cluster_masters, sentinels=False)
            return found
        return self._url.nodes

    def _asked(self, question: Callable[[Any, Node], Any], *, sentinels: bool) -> Any:
        """Ask the servers of the URL in turn, until one answers."""
        error: Exception = OSError("no server was named")
        for node in self._url.nodes:
            try:
                return question(self._client(node, sentinel=sentinels), node)
            except self._errors as exc:
                error = exc
        raise error

    def _master(self, client: Any, _asked: Node) -> Node:
        answer = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
        if not answer:
            raise OSError(f"the Sentinel knows no master '{self._url.master}'")
        host, port = answer
        return _text(host), int(port)

    def _cluster_masters(self, client: Any, asked: Node) -> tuple[Node, ...]:
        # As two words: redis-py turns the answer to "CLUSTER SLOTS" into a dictionary.
        ranges = client.execute_command("CLUSTER", "SLOTS")
        served = sum(int(last) - int(first) + 1 for first, last, *_ in ranges)
        if served != 16384:
            raise OSError(f"the cluster serves {served} of 16384 slots")
        # No address in the answer means the server that was asked.
        named = (
            (_text(host or "") or asked[0], int(port)) for _, _, (host, port, *_), *_ in ranges
        )
        return tuple(dict.fromkeys(named))

    def _client(self, node: Node | None, *, sentinel: bool = False) -> Any:
        """Return the client of a node; None is the one server of the URL."""
        if (node, sentinel) not in self._clients:
            options = self._to_sentinels if sentinel else self._options
            where = {} if node is None else {"host": node[0], "port": node[1]}
            self._clients[node, sentinel] = new_client(self._class, {**options, **where})
        return self._clients[node, sentinel]


def _settings(client: Any) -> RedisSeen:
    from deploy.doctor.observed import RedisSeen

    info = if_allowed(client.info) or {}
    saves = if_allowed(client.config_get, "save") or {}
    append_only, memory = info.get("aof_enabled"), RedisMemory.read(info)
    return RedisSeen(
        version=str(info["redis_version"]) if "redis_version" in info else None,
        max_memory_bytes=memory.limit_bytes,
        policy=memory.policy,
        append_only=None if append_only is None else bool(append_only),
        snapshots=saves.get("save"),
    )


def _text(word: bytes | str) -> str:
    return word.decode() if isinstance(word, bytes) else word


def open_url_store(url: RedisUrl) -> AbstractContextManager[UrlStore]:
    """Return a store for a with block, which closes it; ValueError as `UrlStore`."""
    return closing(UrlStore(url))
