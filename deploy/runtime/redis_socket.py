"""A connection to a stack's own Redis; importing redis-py would take longer."""

from __future__ import annotations

import socket
from typing import Any

from deploy.runtime.bounded_redis import STEP_S, measured
from deploy.runtime.secrets import Secret

# The path of a Unix socket, or host and port.
SocketAddress = str | tuple[str, int]
_PIECE = 1 << 16
_MAX_DEPTH = 8  # of arrays in arrays; SCAN answers two


class RedisError(Exception):
    """What Redis answers instead of doing what it was asked."""


class RedisSocket:
    """Sends one command after another; each answer has the limits of `bounded_redis`.

    It connects with the first command, and again after one that was not answered. Retries are
    up to the caller.
    """

    def __init__(self, address: SocketAddress, password: Secret | None) -> None:
        self._address = address
        self._password = password
        self._connection: _Connection | None = None

    def ask(self, *words: str | bytes | int) -> Any:
        """Return the answer to a command: bytes, a number, None, or a list of these.

        Raises:
            RedisError: Redis refuses the command, or the password.
            OSError: no answer, an incomplete, late or too long one, or one that is not Redis's.
        """
        try:
            if self._connection is None:
                self._connection = _connected(self._address, self._password)
            return self._connection.exchange(*words)
        except RedisError:  # a whole answer
            raise
        except BaseException:  # also on an interrupt: the next command would get this one's answer
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connected(address: SocketAddress, password: Secret | None) -> _Connection:
    connection = _Connection(_opened(address))
    try:
        if password:
            connection.exchange("AUTH", password.reveal())
    except (OSError, RedisError):
        connection.close()
        raise
    return connection


def _opened(address: SocketAddress) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, STEP_S)
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(STEP_S)
    try:
        opened.connect(address)
    except OSError:
        opened.close()
        raise
    return opened


class _Connection:
    """Speaks RESP2."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._measured = measured(opened)
        self._read = bytearray()

    def close(self) -> None:
        self._socket.close()

    def exchange(self, *words: str | bytes | int) -> Any:
        self._measured.restart()
        self._socket.sendall(_encoded(words))
        answer = self._answer(_MAX_DEPTH)
        if isinstance(answer, RedisError):
            raise answer
        return answer

    def _answer(self, depth: int) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-" and depth == _MAX_DEPTH:
            return RedisError(rest.decode("utf-8", "replace"))
        if kind == b"+":
            return rest
        number = _number(rest)
        if kind == b":":
            return number
        if kind not in (b"$", b"*") or depth == 0:
            raise ConnectionError(f"not a Redis reply: {line[:40]!r}")
        if number < 0:
            return None
        if kind == b"$":
            return self._take(number + 2)[:-2]
        return [self._answer(depth - 1) for _ in range(number)]

    def _line(self) -> bytes:
        while (end := self._read.find(b"\r\n")) < 0:
            self._receive()
        return self._take(end + 2)[:-2]

    def _take(self, size: int) -> bytes:
        while len(self._read) < size:
            self._receive()
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    def _receive(self) -> None:
        piece = self._measured.recv(_PIECE)
        if not piece:
            raise ConnectionError("Redis closed the connection")
        self._read += piece


def _encoded(words: tuple[str | bytes | int, ...]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"not a Redis reply: {text[:40]!r}") from None
