"""Redis' protocol on one connection, which moves values without copying them.

redis-py makes the connection: it knows how to log in, to choose a database and to speak TLS. The
bytes then go straight between the socket and the caller's memory.

A value is read in ranges, a few of which are requested ahead. Redis copies its answers. A value of
many MB is copied into fresh memory each time, and has left the processor's cache when it is sent.
Ranges of half a MiB are copied, sent and received within the cache. `bench/redis_path` measures
both.

Between two ranges another client may replace the value or remove it: two producers that compute one
prompt at once each store its chunks, whose bytes differ where they were computed in other batches.
What was read is then of two values. One command that reads all of a value cannot be torn so.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, PayloadChecksum

_BUFFER_BYTES = 4096
# struct timeval: seconds and microseconds.
_TIMEVAL = struct.Struct("@ll")
# No line of Redis is longer.
_LINE_BYTES = 1 << 16
# Beyond one line, the most that a server may answer to each command: a short error.
_ERROR_BYTES = 1 << 9
# How long a call on a socket may take beyond its deadline, and how much before it may be given up.
_LATE_S, _EARLY_S = 0.02, 0.001


class ReplyError(Exception):
    """Redis answered with an error; `code` is its first word, such as OOM."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class LinkBroken(ConnectionError):
    """The connection was closed, or the answer is not one of Redis."""


@dataclass(frozen=True)
class Timeouts:
    """How long some work may take, and how long the server may be silent meanwhile."""

    limit_s: float
    silent_s: float

    def begin(self) -> Deadline:
        """Return the deadline of work that begins now."""
        return Deadline(self.limit_s, self.silent_s)


class Deadline:
    """The moment at which work ends."""

    def __init__(self, seconds: float, silent_s: float = math.inf) -> None:
        self._at = time.monotonic() + seconds
        self._silent_s = silent_s

    def passed(self) -> bool:
        """Tell whether no time is left."""
        return time.monotonic() >= self._at

    def left_s(self) -> float:
        """Return the seconds that are left; raise TimeoutError if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return left

    def call_s(self) -> float:
        """Return how long the next call may wait for a byte; raise as `left_s` does."""
        return min(self.left_s(), self._silent_s)


class _Limited:
    """A socket whose calls end at deadlines.

    Python's own timeouts cost two more system calls for every call that waits. The kernel can limit
    calls itself, and wait for all of the wanted bytes, except with TLS.
    """

    def __init__(self, plain_or_tls: Any) -> None:
        self._socket = plain_or_tls
        self._plain = not isinstance(plain_or_tls, ssl.SSLSocket)
        self._told_left_s = -1.0
        if self._plain:
            self._socket.settimeout(None)

    def send(self, data: memoryview, deadline: Deadline) -> int:
        """Send some bytes; return how many."""
        self._limit(deadline)
        try:
            return int(self._socket.send(data))
        except BlockingIOError:
            raise TimeoutError("Redis took too long") from None

    def receive(self, target: memoryview, deadline: Deadline, *, whole: bool = False) -> int:
        """Receive some bytes, at least one and if possible all; return how many."""
        self._limit(deadline)
        try:
            count = int(
                self._socket.recv_into(target, 0, socket.MSG_WAITALL)
                if whole and self._plain
                else self._socket.recv_into(target)
            )
        except BlockingIOError:
            raise TimeoutError("Redis took too long") from None
        if not count:
            raise LinkBroken("Redis closed the connection")
        return count

    def _limit(self, deadline: Deadline) -> None:
        """Limit the next call, which may end a little after the deadline.

        Setting the limit costs as much as reading some KiB, so it is set only now and then: the
        last question's, which had as much time, serves the next one.
        """
        left_s = deadline.call_s()
        if -_LATE_S <= left_s - self._told_left_s <= _EARLY_S:
            return
        if self._plain:
            # The kernel takes zero for no limit.
            limit = _TIMEVAL.pack(int(left_s), max(1, int(left_s % 1 * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            self._socket.settimeout(left_s)
        self._told_left_s = left_s


class Link:
    """A connection. After any error its state is unknown: close it."""

    def __init__(self, connection: Any) -> None:
        """Take over a connected connection of redis-py.

        Its socket is private (`_sock`); there is no public way to the same bytes without a copy.
        """
        self._connection = connection
        self._socket = _Limited(connection._sock)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send all parts, one after the other."""
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[self._socket.send(left, deadline) :]

    def line(self, deadline: Deadline) -> bytes:
        """Return the next line of a reply without its end."""
        line = b""
        while True:
            end = self._buffer.find(b"\n", self._start, self._end)
            if end >= 0:
                line += bytes(self._view[self._start : end + 1])
                self._start = end + 1
                if not line.endswith(b"\r\n"):
                    raise LinkBroken(f"a line that ends in {line[-2:]!r}")
                return line[:-2]
            line += bytes(self._view[self._start : self._end])
            if len(line) > _LINE_BYTES:
                raise LinkBroken("a line without an end")
            self._fill(deadline)

    def status(self, deadline: Deadline) -> bytes:
        """Return a simple reply or a number; raise ReplyError where Redis refused."""
        line = self.line(deadline)
        if line[:1] in b"+:" and line:
            return line[1:]
        raise self._unexpected(line)

    def numbers(
        self, count: int, deadline: Deadline, otherwise: Callable[[ReplyError], int]
    ) -> list[int]:
        """Return the answers to that many commands; nothing else may be outstanding on this link.

        For a refused command, the answer is what `otherwise` returns; it may raise.
        """
        text, seen = b"", 0
        while True:
            more = self._view[self._start : self._end]
            text += more
            seen += self._buffer.count(b"\n", self._start, self._end)
            if seen >= count:
                break
            if len(text) > _LINE_BYTES + count * _ERROR_BYTES:
                raise LinkBroken("answers without an end")
            self._fill(deadline)
        self._start = self._end
        try:
            # The usual case: all are numbers.
            found = list(map(int, text[1:-2].split(b"\r\n:"))) if text[:1] == b":" else []
        except ValueError:
            found = []
        if len(found) != count:
            found = [self._number(line, otherwise) for line in text[:-2].split(b"\r\n")]
        if len(found) != count or not text.endswith(b"\r\n"):
            raise LinkBroken(f"{len(found)} answers to {count} questions")
        return found

    def _number(self, line: bytes, otherwise: Callable[[ReplyError], int]) -> int:
        if line[:1] == b":" and line[1:].isdigit():
            return int(line[1:])
        error = self._unexpected(line)
        if isinstance(error, ReplyError):
            return otherwise(error)
        raise error

    def length(self, deadline: Deadline) -> int | None:
        """Return the length of the string that follows, or None where there is no such key."""
        line = self.line(deadline)
        if line in (b"$-1", b"_"):
            return None
        if line[:1] == b"$" and line[1:].isdigit():
            return int(line[1:])
        raise self._unexpected(line)

    def read_into(self, target: memoryview, deadline: Deadline) -> int:
        """Read some bytes, at least one and at most `target` holds; return how many.

        If the operating system can wait for all of it, it comes at once.
        """
        if self._start < self._end:
            count = min(self._end - self._start, len(target))
            target[:count] = self._view[self._start : self._start + count]
            self._start += count
            return count
        return self._socket.receive(target, deadline, whole=True)

    def read(self, count: int, deadline: Deadline) -> bytes:
        """Return exactly `count` bytes."""
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            if self._start == self._end:
                # More may come with it, such as the start of the next answer.
                self._fill(deadline)
            filled += self.read_into(view[filled:], deadline)
        return bytes(data)

    def end_of_string(self, deadline: Deadline) -> None:
        """Read the end of a string."""
        if self.read(2, deadline) != b"\r\n":
            raise LinkBroken("a string that is longer than announced")

    def _fill(self, deadline: Deadline) -> None:
        self._start, self._end = 0, self._socket.receive(self._view, deadline)

    @staticmethod
    def _unexpected(line: bytes) -> Exception:
        if line[:1] == b"-":
            return ReplyError(line[1:].decode("utf-8", "replace"))
        return LinkBroken(f"an answer that starts with {line[:20]!r}")


def command(*words: bytes) -> bytes:
    """Return a command of Redis' protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


# The first range; a value that fits into it needs no other.
_FIRST_BYTES = 1 << 20
_RANGE_BYTES = 512 << 10
# Ranges that were requested and not read yet.
_AHEAD = 4
# Where a range ends that has all of a value, which Redis limits to half a GiB by default.
_ALL = 1 << 62


class Reading:
    """A value that was requested. After any error the link's state is unknown."""

    def __init__(
        self, link: Link, key: bytes, deadline: Deadline, *, in_one_command: bool = False
    ) -> None:
        """Ask for the first range, which has the header, or for all of the value."""
        self._link = link
        self._key = key
        self._deadline = deadline
        # Where the ranges end that were asked for and not read to their end.
        self._ends: deque[int] = deque()
        self._asked_bytes = 0
        self._left = 0  # bytes of the answer that is being read
        self._answers = 0
        self._ask(_ALL if in_one_command else HEADER_BYTES + _FIRST_BYTES)

    @property
    def unread(self) -> bool:
        """Whether answers are outstanding, so that the link cannot be used for anything else."""
        return bool(self._ends)

    @property
    def may_be_torn(self) -> bool:
        """Whether what was read may be of two values."""
        return self._answers > 1

    def header(self) -> bytes | None:
        """Return the header's bytes, or None where there is no such key.

        Raises:
            BadValue: the value is too short to have one.
            ReplyError: Redis refused.
        """
        self._begin()
        if not self._left:
            self._end()
            return None
        if self._left < HEADER_BYTES:
            raise BadValue("corrupt", f"it has {self._left} bytes")
        self._left -= HEADER_BYTES
        return self._link.read(HEADER_BYTES, self._deadline)

    def payload(
        self, memory: memoryview, check: PayloadChecksum, all_asked: Callable[[], None]
    ) -> None:
        """Fill memory with what follows the header.

        Args:
            memory: of as many bytes as the header announced.
            check: gets every byte while it is in the processor's cache.
            all_asked: called when the last range has been requested.

        Raises:
            BadValue: the value is shorter or longer, or its checksum does not match; of the kind
                "missing" where it was removed meanwhile.
        """
        total, filled, notified = HEADER_BYTES + len(memory), 0, False
        while True:
            self._ask_ahead(total)
            if self._asked_bytes > total and not notified:
                all_asked()
                notified = True
            filled += self._range(memory[filled:], check)
            if HEADER_BYTES + filled < min(self._ends[0], total):
                raise BadValue("corrupt", f"{filled} of {len(memory)} bytes follow its header")
            self._end()
            if not self._ends:
                break
            self._begin()
            if not self._left and HEADER_BYTES + filled < total:
                raise BadValue("missing", "it was removed while it was read")
        check.require()

    def _range(self, memory: memoryview, check: PayloadChecksum) -> int:
        """Read the rest of an answer; return its length."""
        if self._left > len(memory):
            raise BadValue("corrupt", "it is longer than its header says")
        filled = 0
        while self._left:
            count = self._link.read_into(memory[filled : filled + self._left], self._deadline)
            check.update(memory[filled : filled + count])
            filled += count
            self._left -= count
        return filled

    def _ask_ahead(self, value_bytes: int) -> None:
        while self._asked_bytes <= value_bytes and len(self._ends) < _AHEAD:
            # One byte more than the value has shows whether it is longer.
            self._ask(min(self._asked_bytes + _RANGE_BYTES, value_bytes + 1))

    def _ask(self, end: int) -> None:
        first, last = b"%d" % self._asked_bytes, b"%d" % (end - 1)
        self._link.send([command(b"GETRANGE", self._key, first, last)], self._deadline)
        self._asked_bytes = end
        self._ends.append(end)

    def _begin(self) -> None:
        self._answers += 1
        try:
            self._left = self._link.length(self._deadline) or 0
        except ReplyError:
            self._ends.popleft()  # the error is all of the answer
            raise

    def _end(self) -> None:
        self._link.end_of_string(self._deadline)
        self._ends.popleft()
