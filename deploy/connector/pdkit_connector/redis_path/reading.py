"""Reading one value from Redis in ranges, a few of which are requested ahead.

Redis copies its answers. A value of many MB is copied into fresh memory each time, and has left the
processor's cache when it is sent. Ranges of half a MiB are copied, sent and received within the
cache. `bench/redis_path` measures both.

Between two ranges another client may replace the value or remove it: two producers that compute one
prompt at once each store its chunks, whose bytes differ where they were computed in other batches.
What was read is then of two values. One command that reads all of a value cannot be torn so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdkit_connector.redis_path.link import Deadline, Link, ReplyError, command
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, PayloadChecksum

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
        total, filled, told = HEADER_BYTES + len(memory), 0, False
        while True:
            self._ask_ahead(total)
            if self._asked_bytes > total and not told:
                all_asked()
                told = True
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
