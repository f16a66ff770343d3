"""The answer to one request, on its way to the client."""

from __future__ import annotations

import http
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdkit_router.client_side import ClientConnection

_STATUS_LINES = {int(one): f"HTTP/1.1 {int(one)} {one.phrase}" for one in http.HTTPStatus}


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
