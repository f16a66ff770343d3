"""Answers on their way from an engine to a client, of which little is held."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdkit_router.client_side import ClientResponse
from pdkit_router.continuation import Transcript
from pdkit_router.engine_side import HELD_BYTES, EngineLost, Exchange

TRACE = "x-pdkit-trace"
# In the usage of an answer. Within a text of JSON every quote has a backslash.
_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')

Headers = tuple[tuple[str, str], ...]


@dataclass
class Trace:
    """The outcome of a request.

    Attributes:
        cached: tokens of the prompt that the last engine did not compute; "" if it does not say.
    """

    producer: str = "-"
    consumer: str = "-"
    tries: int = 0
    cached: str = ""

    def header(self) -> str:
        """Return the trace as the value of a response header."""
        found = f"producer={self.producer}; consumer={self.consumer}; tries={self.tries}"
        return f"{found}; cached={self.cached}" if self.cached else found

    def attributes(self) -> dict[str, str | int]:
        """Return it as a span of the request has it."""
        cached = {"pdkit.cached_tokens": int(self.cached)} if self.cached else {}
        named = {"pdkit.producer": self.producer, "pdkit.consumer": self.consumer}
        return {**named, "pdkit.tries": self.tries, **cached}

    def read(self, answer: bytes | bytearray) -> bool:
        """Note the cached tokens of an answer or an event; return whether it has them."""
        if found := _CACHED.findall(answer):
            self.cached = found[-1].decode()
        return bool(found)

    def follow(self, events: bytes) -> bytes:
        """Return whole events, with this as a comment behind the one that completes it."""
        if not self.read(events):
            return events
        end = events.index(b"\n\n", events.rindex(b'"cached_tokens":')) + 2
        return events[:end] + f": {TRACE} {self.header()}\n\n".encode() + events[end:]


def whole(exchange: Exchange, headers: Headers, answer: ClientResponse) -> None:
    """Pass on an answer of which all came."""
    answer.whole(exchange.status, (*headers, *_kind(exchange)), bytes(exchange.held))


async def pass_on(exchange: Exchange, headers: Headers, answer: ClientResponse) -> bool:
    """Pass on an answer of which some came, as fast as the client reads.

    Returns:
        Whether all of it came; the client's connection is closed if not.
    """
    answer.begin(exchange.status, (*headers, *_kind(exchange)))
    exchange.pass_to(answer.piece)
    answer.paces(exchange.pause)
    try:
        await exchange.ended
    except EngineLost:
        answer.break_off()
        return False
    answer.end()
    return True


def _kind(exchange: Exchange) -> Headers:
    return (("content-type", exchange.content_type),) if exchange.content_type else ()


class Events:
    """Server-sent events on their way: each whole, so that others can follow the last one.

    A large one goes in parts if no other engine could go on with the stream in any case. Those that
    can be continued have none: their events are tokens, and the first one the prompt's.

    Attributes:
        told: what has gone to the client.
    """

    def __init__(
        self, answer: ClientResponse, told: Transcript | None, trace: Trace | None = None
    ) -> None:
        self.answer, self._trace = answer, trace
        self.told = told or Transcript("", {}, problem="it is not a stream that can be continued")
        self._part = bytearray()
        self._begun = False  # the client has the beginning of what is in the part
        # Nothing is read in most streams, whose events are nearly all that a router does for them.
        self._pass = self._send if self.told.asks or trace else answer.piece

    def feed(self, data: bytes) -> None:
        """Pass on whole events, and hold back one that has not ended."""
        if not self._part and data.endswith(b"\n\n"):  # as engines send them
            self._pass(data)
            return
        searched = max(0, len(self._part) - 1)
        self._part += data
        end = self._part.rfind(b"\n\n", searched) + 2
        if end > 1:
            self._begun = False
        elif len(self._part) > HELD_BYTES and not self.told.asks:
            self._begun = True
            end = len(self._part) - 1  # its last byte may be half of an end
        else:
            return
        ready = bytes(self._part[:end])
        del self._part[:end]
        self._pass(ready)

    def _send(self, ready: bytes) -> None:
        if self.told.asks:
            noted = map(self.told.note, ready[:-2].split(b"\n\n"))
            # One by one: behind an error comes the end of a stream, which may go on.
            ready = b"".join([event + b"\n\n" for event in noted if not self.told.failure_told])
        if self._trace and not self._begun:
            ready = self._trace.follow(ready)
        if ready:  # an empty piece would be the end
            self.answer.piece(ready)

    def drop_part(self) -> bool:
        """Forget the beginning of an event whose end does not come.

        Returns:
            Whether the client has a part of it.
        """
        self._part.clear()
        return self._begun
