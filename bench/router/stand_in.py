"""An engine that answers at once: `python -m bench.router.stand_in PORT...` serves each port.

It parses no more HTTP than it needs, so that what is measured is the router before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = 32
_MODELS = b'{"object": "list", "data": [{"id": "stand-in", "max_model_len": 4096}]}'
_WHOLE = b'{"id": "cmpl-0", "object": "text_completion", "choices": [{"index": 0, "text": "ok"}]}'
_EVENT = b'data: {"id": "cmpl-0", "object": "text_completion", "choices": [{"text": "a"}]}\n\n'


def _answer(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._held = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._held) < whole:
                return
            body, self._held = self._held[end + 4 : whole], self._held[whole:]
            self._serve(head, body)

    def _serve(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._transport.write(_answer(b"application/json", _MODELS))
        elif json.loads(body).get("stream"):  # of equal names the last counts, as in an engine
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._stream(_TOKENS)
        else:
            self._transport.write(_answer(b"application/json", _WHOLE))

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
        loop = asyncio.get_running_loop()
        if self._gap_s:
            loop.call_later(self._gap_s, self._stream, left - 1)
        else:
            loop.call_soon(self._stream, left - 1)


async def _serve(ports: list[int], gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Engine(gap_s), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until ended."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("ports", type=int, nargs="+")
    options.add_argument("--gap-ms", type=float, default=0.0, help="between two tokens of a stream")
    given = options.parse_args()
    uvloop.run(_serve(given.ports, given.gap_ms / 1000))


if __name__ == "__main__":
    main()
