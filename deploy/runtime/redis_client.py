"""The kit's own questions to Redis: redis-py, with limits that no server can exceed.

redis-py reads as many bytes as a server announces, and its timeout starts again with every byte.
Here, each answer is limited in size and in total time. Engines have such limits in the connector,
which the kit does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cache
from typing import Any

from deploy.metrics.store_stats import StoreStats
from deploy.runtime.measured_socket import MeasuredSocket
from deploy.runtime.secrets import Secret
from deploy.runtime.store import Refusal, Scan, marked_keys, stats_from

# The path of a Unix socket, or host and port.
SocketAddress = str | tuple[str, int]

# Limit of each step: connecting, TLS, one read.
STEP_S = 2.0
# Limits of one answer; a page of keys has about 100 KiB.
ANSWER_S = 6.0
ANSWER_BYTES = 4 << 20

# Errors of redis-py, and of the code here, on answers that no Redis gives.
NOT_OF_REDIS = (
    TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


def errors() -> tuple[type[Exception], ...]:
    """Return what a question may raise."""
    import redis

    return (redis.RedisError, OSError, *NOT_OF_REDIS)


def limits() -> dict[str, Any]:
    """Return the options of every connection."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": STEP_S,
        "socket_connect_timeout": STEP_S,
        # Retries are up to the caller; the client's own would hide a dead Redis.
        "retry": Retry(NoBackoff(), 0),
        # With RESP3, a failed log-in is reported as a failed HELLO instead.
        "protocol": 2,
    }


@cache
def bounded(connection_class: type) -> type:
    """Return the class of redis-py's connections with limits for each answer."""

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            return measured(super()._connect())

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self._sock is not None:
                self._sock.restart()
            super().send_packed_command(command, check_health=check_health)

    return Bounded


def measured(plain_or_tls: Any) -> MeasuredSocket:
    """Return a socket to Redis with these limits."""
    return MeasuredSocket(plain_or_tls, answer_s=ANSWER_S, answer_bytes=ANSWER_BYTES)


def new_client(connection_class: type, options: Mapping[str, Any]) -> Any:
    """Return a client whose connections are of a bounded class; it connects when asked."""
    import redis

    pool = redis.ConnectionPool(connection_class=connection_class, **options)
    return redis.Redis.from_pool(pool)  # which it closes


def client_at(address: SocketAddress, password: Secret | None) -> Any:
    """Return a client for a stack's own Redis."""
    from redis.connection import Connection, UnixDomainSocketConnection

    options = {**limits(), "password": password.reveal() if password else None}
    if isinstance(address, str):
        return new_client(bounded(UnixDomainSocketConnection), {**options, "path": address})
    host, port = address
    return new_client(bounded(Connection), {**options, "host": host, "port": port})


def server_stats(client: Any) -> StoreStats:
    """Return a reading of a server; fields that this user may not ask for are left out.

    Raises:
        RedisError, OSError: it does not answer, or does not let the user in.
    """
    info = if_allowed(client.info) or {}
    commands = if_allowed(client.info, "commandstats") or {}
    keys = if_allowed(client.dbsize)
    return stats_from({**info, **commands}, None if keys is None else int(keys))


def refusal_of(client: Any) -> Refusal | None:
    """Return what a server says instead of serving; None if it serves, or says nothing."""
    from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

    try:
        client.ping()
    except NoPermissionError:
        return None  # a user who may store and load need not be allowed to PING
    except (AuthenticationError, ResponseError) as exc:
        return Refusal(str(exc), isinstance(exc, AuthenticationError))
    except errors():
        pass
    return None


def if_allowed(ask: Callable[..., Any], *arguments: str) -> Any:
    """Return an answer, or None if Redis refuses this command."""
    from redis.exceptions import ResponseError

    try:
        return ask(*arguments)
    except ResponseError:
        return None


def scan_of(client: Any) -> Scan:
    """Return a function that asks this client for a page of keys."""

    def page(cursor: int, pattern: str, count: int) -> tuple[int, list[bytes]]:
        after, keys = client.scan(cursor, match=pattern, count=count)
        if not all(isinstance(key, bytes) for key in keys):
            raise TypeError("not a page of keys")
        return after, keys

    return page


class SocketStore:
    """A stack's own Redis, at a socket."""

    def __init__(self, address: SocketAddress, password: Secret | None) -> None:
        self._client = client_at(address, password)
        self._errors = errors()

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        try:
            return bool(self._client.ping())
        except self._errors:
            return False

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None if it serves, or says nothing."""
        return refusal_of(self._client)

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        try:
            return server_stats(self._client)
        except self._errors:
            return None

    def marked_keys(self, mark: str) -> set[bytes] | None:
        """Return the keys that contain a mark; None if Redis does not answer."""
        try:
            return marked_keys(scan_of(self._client), mark)
        except self._errors:
            return None

    def unlink(self, keys: Sequence[bytes]) -> int | None:
        """Remove what there is of the keys; None if Redis does not answer."""
        try:
            return int(self._client.unlink(*keys)) if keys else 0
        except self._errors:
            return None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def open_store(
    address: SocketAddress, password: Secret | None
) -> AbstractContextManager[SocketStore]:
    """Return a store for a with block, which closes it."""
    return closing(SocketStore(address, password))
