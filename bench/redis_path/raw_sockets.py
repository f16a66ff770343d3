"""The reference: plain sockets, without a checksum or a staging pool."""

from __future__ import annotations

import socket

from bench.redis_path.contender import Span, Where, measured


class RawSocket:
    """The reference: one connection, one value after the other, memory that is used again."""

    def __init__(self, where: Where, engine: int) -> None:
        self._socket = self._connected(where)
        self._engine = engine
        self._keys: list[bytes] = []
        self._memory: list[bytearray] = []

    def _connected(self, where: Where) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", where.port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def open(self, value_bytes: int, count: int) -> None:
        self._keys = [b"raw:%d:%d:%d" % (self._engine, value_bytes, n) for n in range(count)]
        self._memory = [bytearray(b"\1" * value_bytes) for _ in range(count)]

    def store(self) -> Span:
        for number, memory in enumerate(self._memory):
            memory[0] = memory[-1] = number % 251
        with measured() as span:
            for key, memory in zip(self._keys, self._memory, strict=True):
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(memory))
                self._socket.sendall(head)
                self._socket.sendall(memory)
                self._socket.sendall(b"\r\n")
                if self._line() != b"+OK":
                    raise RuntimeError("SET failed")
        return span

    def retrieve(self) -> Span:
        for memory in self._memory:
            memory[0] = memory[-1] = 255
        with measured() as span:
            for key, memory in zip(self._keys, self._memory, strict=True):
                self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
                self._read_string(memoryview(memory))
        for number, memory in enumerate(self._memory):
            if memory[0] != number % 251 or memory[-1] != number % 251:
                raise RuntimeError("wrong bytes")
        return span

    def lookup(self, count: int) -> Span:
        with measured() as span:
            asked = [b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%s\r\n" % (len(k), k) for k in self._keys]
            self._socket.sendall(b"".join(asked[:count]))
            answer = b""
            while answer.count(b"\n") < count:
                answer += self._socket.recv(1 << 16)
            found = [int(line[1:]) for line in answer.split()]
        if not all(found):
            raise RuntimeError("values are missing")
        return span

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return line[:-2]

    def _read_string(self, memory: memoryview) -> None:
        peeked = self._socket.recv(64, socket.MSG_PEEK)
        size = peeked.index(b"\n") + 1
        self._socket.recv(size)
        if int(peeked[1 : size - 2]) != len(memory):
            raise RuntimeError("another length")
        filled = 0
        while filled < len(memory):
            filled += self._socket.recv_into(memory[filled:])
        self._socket.recv(2, socket.MSG_WAITALL)


class RawUnixSocket(RawSocket):
    """The same over a Unix socket."""

    def _connected(self, where: Where) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(where.socket)
        return connected
