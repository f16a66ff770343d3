"""Connecting and logging in, by redis-py, to a server that may be hostile or broken.

redis-py reads as much as a server announces, and restarts its timeout after every byte.
"""

from __future__ import annotations

from typing import Any

from pdkit_connector.redis_path.address import Address
from pdkit_connector.redis_path.link import Deadline, LinkBroken

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
