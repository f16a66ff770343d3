"""The side of clients: HTTP/1.1, with a limit on all that a client can take or keep waiting."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import httptools

from pdkit_router.request import Refused, Request, error_body
from pdkit_router.timers import LazyTimer

_log = logging.getLogger("router")
HEAD_BYTES = 32 * 1024  # of a request
_HEADERS = 100
_STATUS_LINES = {int(one): f"HTTP/1.1 {int(one)} {one.phrase}" for one in http.HTTPStatus}
_LINGER_S = 2.0  # for a client that still sends when its answer is on its way


@dataclass
class ClientLimits:
    """What clients may take.

    Attributes:
        body_bytes: of one request.
        held_bytes: of all bodies together, at least two of the largest. What a request takes beside
            its body (a second copy, its text and token ids once more) is in proportion, so that a
            GiB is enough for all of it.
        head_s, body_s: for sending them.
        idle_s: between two requests of a connection.
        stuck_s: that a client may leave its answer unread.
    """

    connections: int = 2048
    requests: int = 1024
    body_bytes: int = 64 * 2**20
    held_bytes: int = 128 * 2**20
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 120.0
    stuck_s: float = 60.0


class Door(Protocol):
    """Says who is let in."""

    def check(self, request: Request) -> None:
        """Raise Refused where a request is not."""


class ClientResponse:
    """The answer to one request, whole or in pieces; the latter are chunked in HTTP/1.1.

    Attributes:
        began: the head was sent, so that another answer is no longer possible.
        status: of that head; 0 until then.
        on_pause: called with True when the client reads too slowly, and with False when it is
            ready for more.
    """

    def __init__(self, connection: ClientConnection, *, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked
        self.began = False
        self.status = 0
        self.on_pause: Callable[[bool], None] = lambda _: None

    def whole(self, status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
        """Send everything at once."""
        self.began, self.status = True, status
        self._connection.send_whole(status, headers, body)

    def begin(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        """Send the head of an answer that comes in pieces."""
        self.began, self.status = True, status
        framing = (("transfer-encoding", "chunked"),) if self._chunked else ()
        self._connection.send(
            response_head(status, (*headers, *framing), keep=self._connection.keeps)
        )

    def paces(self, pause: Callable[[bool], None]) -> None:
        """Have an engine's answer wait for the client, which may be behind with another's."""
        self.on_pause = pause
        if self._connection.unread:
            pause(True)

    def piece(self, data: bytes) -> None:
        """Send the next piece of the body."""
        self._connection.send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """Say that the answer is complete."""
        if self._chunked:
            self._connection.send(b"0\r\n\r\n")

    def break_off(self) -> None:
        """Close without that: what was sent is not the whole answer."""
        self._connection.abort()


def response_head(status: int, headers: tuple[tuple[str, str], ...], *, keep: bool) -> bytes:
    """Return status line and headers; without `keep` they announce the connection's end."""
    lines = [_STATUS_LINES[status], *(f"{name}: {value}" for name, value in headers)]
    lines += [] if keep else ["connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


Serve = Callable[[Request, ClientResponse], Awaitable[None]]


@dataclass
class Clients:
    """All connections of clients.

    Attributes:
        waiting: those without a request, the one that has waited longest first.
        busy: requests that are being answered.
        held: bytes of bodies that came, until their requests are answered.
        leaving: each connection closes behind its next answer.
    """

    limits: ClientLimits
    doorkeeper: Door
    serve: Serve
    waiting: dict[ClientConnection, None] = field(default_factory=dict)
    open: int = 0
    busy: int = 0
    held: int = 0
    leaving: bool = False

    def connection(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        return ClientConnection(self)

    def admit(self, request: Request) -> None:
        """Raise Refused where a request may not come in, by its head."""
        self.doorkeeper.check(request)
        length = request.content_length or 0
        if length > self.limits.body_bytes:
            raise large_body(self.limits.body_bytes)
        if self.busy >= self.limits.requests:
            raise too_many()

    def hold(self, size: int) -> None:
        """Count bytes of a body; raise Refused if there is no room for them.

        The body that has been incomplete longest makes room for others.
        """
        self.held += size
        while self.held > self.limits.held_bytes:
            oldest = next((one for one in self.waiting if one.taken), None)
            if oldest is None:
                raise too_many()
            oldest.refuse(too_many())


class ClientConnection(asyncio.Protocol):
    """One connection: a request at a time, and none beside it."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._answer: ClientResponse | None = None
        self._loop = asyncio.get_running_loop()
        self._limit = LazyTimer(self._loop)
        self._closing = False
        self.unread = False  # the client is behind with what was sent
        self._fresh()

    def _fresh(self) -> None:
        self._target, self._headers = b"", list[tuple[str, str]]()
        self._head_done = False
        self._beside = 0
        self._request: Request | None = None
        self.taken = 0
        self.keeps = True

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        clients = self._clients
        clients.open += 1
        if clients.open > clients.limits.connections:
            # The connection that has been idle longest makes room.
            oldest = next(iter(clients.waiting), self)
            clients.waiting.pop(oldest, None)
            oldest.abort()
            if oldest is self:
                return
        clients.waiting[self] = None
        self._limit.set(clients.limits.head_s, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._clients.open -= 1
        self._clients.waiting.pop(self, None)
        self._closing = True
        self._give_back()
        self._limit.cancel()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.unread = True
        self._limit.set(self._clients.limits.stuck_s, self.abort)
        if self._answer is not None:
            self._answer.on_pause(True)

    def resume_writing(self) -> None:
        self.unread = False
        if self._transport.is_closing() or (self._closing and self._answer is None):
            return  # the limit is for all that is left
        self._limit.lift()
        if self._answer is not None:
            self._answer.on_pause(False)
        else:
            self._transport.resume_reading()
            self._limit.set(self._clients.limits.idle_s, self._leave)

    def abort(self) -> None:
        """Close at once, without sending the rest."""
        self._transport.abort()

    # What comes

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        taken = self.taken
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__
            self.refuse(cause if isinstance(cause, Refused) else Refused(400, "not HTTP/1.1"))
        except httptools.HttpParserError:
            self.refuse(Refused(400, "the request is not valid HTTP/1.1"))
        else:
            # What is no body: the head, extensions of chunks, trailers.
            self._beside = self._beside + len(data) if self.taken == taken else 0
            if self._beside > 2 * HEAD_BYTES and not self._closing:
                self.refuse(long_head())

    def on_message_begin(self) -> None:
        if self._task is not None or self._request is not None:
            # Clients do not send another request before the answer; an attacker might.
            self._closing = True
            self.keeps = False
            raise _Pipelined
        self._clients.waiting.pop(self, None)
        self._clients.waiting[self] = None
        self._limit.set(self._clients.limits.head_s, self._too_slow)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self._head_done = True
        size = len(self._target) + sum(len(name) + len(value) for name, value in self._headers)
        if size > HEAD_BYTES or len(self._headers) > _HEADERS:
            raise long_head()
        method = self._parser.get_method().decode("latin-1")
        request = Request(method, self._target.decode("latin-1"), self._headers)
        self.keeps = self._parser.should_keep_alive() and not self._clients.leaving
        if self._parser.should_upgrade():
            raise Refused(400, "the connection cannot be upgraded; use HTTP/1.1")
        self._clients.admit(request)
        self._request = request
        self._limit.set(self._clients.limits.body_s, self._too_slow)
        if (request.header("expect") or "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        request = self._request
        if request is None:
            return
        request.body += piece
        if len(request.body) > self._clients.limits.body_bytes:
            raise large_body(self._clients.limits.body_bytes)
        self.taken += len(piece)
        self._clients.hold(len(piece))

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._closing:
            return
        self._limit.lift()
        self._clients.waiting.pop(self, None)
        self._clients.busy += 1
        self._answer = ClientResponse(self, chunked=self._parser.get_http_version() == "1.1")
        if self._parser.get_http_version() != "1.1":
            self.keeps = False
        self._task = self._loop.create_task(self._serve(request, self._answer))
        self._task.add_done_callback(self._ended)

    def _give_back(self) -> None:
        self._clients.held -= self.taken
        self.taken = 0

    # What goes

    async def _serve(self, request: Request, answer: ClientResponse) -> None:
        try:
            await self._clients.serve(request, answer)
        except Refused as exc:
            answer.whole(exc.status, exc.headers, exc.body())
        except Exception as exc:  # noqa: BLE001 - one request's fault is not the others'
            _log.error("%s failed: %r", request.path, exc)
            if answer.began:
                answer.break_off()
            else:
                answer.whole(500, (), error_body(500, "the router failed on this request"))
        finally:
            self._served()  # at once: the client may send its next request now

    def _ended(self, task: asyncio.Task[None]) -> None:
        """See to a task that never began, because its client left at once."""
        if task is self._task:
            self._served()

    def _served(self) -> None:
        self._clients.busy -= 1
        self._task = self._answer = None
        self._give_back()
        self._next()

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if self._closing or not self.keeps:
            self._leave()
            return
        self._fresh()
        self._clients.waiting[self] = None
        if self.unread:
            self._transport.pause_reading()  # a client that reads no answer gets no other
        else:
            self._limit.set(self._clients.limits.idle_s, self._leave)

    def _leave(self) -> None:
        """Close when the client has read the rest, or takes too long for it."""
        self._transport.close()
        self._limit.set(self._clients.limits.stuck_s, self.abort)

    def _too_slow(self) -> None:
        self.refuse(Refused(408, "the request did not arrive in time"))

    def refuse(self, refused: Refused) -> None:
        """Answer, and read no further: a client that is refused early may still be sending."""
        self._closing, self.keeps = True, False
        if self._task is not None:
            return
        self._request = None
        self._give_back()
        if not self._transport.is_closing():
            self.send_whole(refused.status, refused.headers, refused.body())
            self._transport.write_eof()
            self._limit.set(_LINGER_S, self.abort)

    def send_whole(self, status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
        """Send a whole answer; it is JSON where the headers name no type."""
        if not any(name == "content-type" for name, _ in headers):
            headers = (*headers, ("content-type", "application/json"))
        headers = (*headers, ("content-length", str(len(body))))
        self.send(response_head(status, headers, keep=self.keeps) + body)

    def send(self, data: bytes) -> None:
        """Write to the client; drop what comes after the connection's end."""
        if not self._transport.is_closing():
            self._transport.write(data)


class _Pipelined(Exception):
    """A second request before the first was answered."""


def too_many() -> Refused:
    """Return the refusal of a request for which there is no room now."""
    return Refused(429, "too many requests are being answered", retry_after_s=1)


def long_head() -> Refused:
    """Return the error for a request whose headers, trailers or chunk extensions are too long."""
    return Refused(431, f"the head of the request is larger than {HEAD_BYTES} bytes")


def large_body(limit_bytes: int) -> Refused:
    """Return the refusal of a request whose body is larger than this."""
    return Refused(
        413, f"the body is larger than {limit_bytes} bytes; deploy.yaml can allow more: "
        "router.max_body_mib",
    )  # fmt: skip
