"""How a prompt's KV gets from its producer to its consumer: one module for each protocol.

A protocol says what a prefill asks for beside its one token, and what of the prefill's answer the
decode is sent. All else is the same for all of them: two phases, retries, what is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol

from pdkit_router.upstream import Engine, Exchange

Fields = Mapping[str, Any]
HandoffOutcome = Literal["passed", "none", "dropped", "lost"]
OUTCOMES: Mapping[HandoffOutcome, str] = {
    "passed": "the decode was sent what the prefill had prepared",
    "none": "the prefill prepared nothing",
    "dropped": "no consumer was sent what was prepared",
    "lost": "the consumer that was sent it failed before its answer began",
}
# Only a stream of tokens shows when the blocks were read. For other answers it is this long.
_READ_S = 1.0
_LOOK_S = 0.5


class Handoff(Protocol):
    """A protocol.

    Attributes:
        name: in arguments and metrics.
        pins: the producer keeps the KV in its own blocks until a consumer has read it.
        reusable: several consumers can load the KV; else what was prepared is never sent twice.
        own_ids: engines find KV by a request's id, so that no client may choose it.
    """

    name: str
    pins: bool
    reusable: bool
    own_ids: bool

    def asks(self, path: str, fields: Fields) -> Fields:
        """Return the fields to set in a prefill; none if the request cannot be handed over."""

    async def read(self, exchange: Exchange) -> Fields | None:
        """Read a prefill's answer to its end; return the fields for the decode.

        Returns:
            None if nothing was prepared.

        Raises:
            Unreadable: something was, and what it is cannot be known.
            EngineLost: the producer broke off.
        """


class Unreadable(Exception):
    """A prefill's answer whose parameters cannot be read."""


class Admission:
    """Bounds the hand-offs of each producer that may hold its KV blocks."""

    def __init__(self, most: int, lease_s: float) -> None:
        """`lease_s` is how long a producer holds blocks that nobody reads."""
        self._most, self._lease_s = most, lease_s
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()

    def has_room(self, producer: Engine) -> bool:
        """Tell whether a producer may be asked for one more."""
        return producer.handoffs < self._most

    async def wait(self, there: Callable[[], Collection[Engine]], *, again: bool) -> None:
        """Return when one of the producers that are there has room, or none is there.

        First come, first served; a request that was sent `again`, with fewer producers to choose
        from, holds up no other.
        """

        def full() -> bool:
            engines = there()
            return bool(engines) and not any(map(self.has_room, engines))

        if again:
            await self._until_room(full)
        elif self._queue.locked() or full():
            async with self._queue:
                await self._until_room(full)

    async def _until_room(self, full: Callable[[], bool]) -> None:
        while full():
            self._freed.clear()
            with suppress(TimeoutError):  # engines come and go without a word
                async with asyncio.timeout(_LOOK_S):
                    await self._freed.wait()

    def free(self, producer: Engine) -> None:
        """Note that one of its hand-offs holds no blocks any more."""
        producer.handoffs -= 1
        self._freed.set()

    def abandon(self, producer: Engine, *, held: bool) -> None:
        """Count a hand-off that nobody will read until its lease has ended.

        Args:
            held: it is among the producer's hand-offs.
        """
        producer.handoffs += not held
        producer.abandoned += 1
        loop, life = asyncio.get_running_loop(), producer.restarts
        loop.call_later(self._lease_s, self._expire, producer, life)

    def _expire(self, producer: Engine, life: int) -> None:
        if producer.restarts == life:
            producer.abandoned -= 1
            self.free(producer)


class Ticket:
    """The hand-off of one request.

    Attributes:
        asks: fields that the prefill has beside those of any prefill; empty if the protocol does
            not hand the request over.
        admission: of the producer; None if the hand-off holds none of its blocks.
        outcome: so far.
    """

    def __init__(
        self, protocol: Handoff, admission: Admission, counts: Counter[str], asks: Fields
    ) -> None:
        self._protocol, self._counts = protocol, counts
        self.admission = admission if protocol.pins and asks else None
        self.asks = asks
        self.outcome: HandoffOutcome = "none"
        self._fields: Fields | None = None  # for the next decode
        self._offered: Fields | None = None  # to this one
        self._producer: Engine | None = None
        self._restarts = 0
        self._holds = False  # the producer's blocks, as far as can be known
        self._timer: asyncio.TimerHandle | None = None
        self._settled = True

    def begin(self) -> None:
        """Count it once it is settled."""
        self._settled = False

    def ask(self, producer: Engine) -> None:
        """Note that a producer is asked, and no longer the one before."""
        self._free()
        if self.admission:
            self._producer, self._holds, self._restarts = producer, True, producer.restarts
            producer.handoffs += 1

    async def take(self, exchange: Exchange) -> None:
        """Read the producer's answer."""
        try:
            fields = await self._protocol.read(exchange)
        except Unreadable:
            self.outcome = "dropped"
            return
        if fields is None or (self._protocol.pins and not self.asks):
            self._free()
        else:
            self._fields, self.outcome = fields, "dropped"  # until it is sent

    def fail(self) -> None:
        """Note that no producer answered."""
        self._free()

    def offer(self) -> Fields:
        """Return what the next consumer is sent, if it takes the connection."""
        self._offered = self._fields
        return self._offered or {}

    def send(self, *, streams: bool) -> None:
        """Note that a consumer is sent it now: never again, unless it can be reused.

        Args:
            streams: the answer begins with its first token.
        """
        if self._offered is None:
            return
        self.outcome = "passed"
        if not self._protocol.reusable:
            self._fields = None
        if self._holds and not streams:
            self._timer = asyncio.get_running_loop().call_later(_READ_S, self._free)

    def lose(self) -> None:
        """Note that a consumer failed before its answer began."""
        if self._offered is not None and self.outcome == "passed":
            self._stop_timer()
            self.outcome = "lost"

    def settle(self, *, read: bool = True) -> None:
        """Count it, once: when the decode's answer begins, or when there will be none.

        Args:
            read: the beginning shows that the consumer has read the blocks.
        """
        if self._settled:
            return
        self._settled = True
        self._counts[f"handoffs_{self.outcome}"] += 1
        left = self.outcome in ("dropped", "lost")
        producer = self._producer
        if left and self.admission and producer and producer.restarts == self._restarts:
            self._stop_timer()
            self.admission.abandon(producer, held=self._holds)
        elif read:
            self._free()

    def _free(self) -> None:
        """Count the blocks as free: they were read, or the engine broke the request off."""
        self._stop_timer()
        if self._holds and self._producer and self.admission:
            self.admission.free(self._producer)
        self._holds = False

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
