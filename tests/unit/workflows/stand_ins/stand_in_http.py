"""A small HTTP server for the stand-ins: importing Python's own takes a third of their start."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]
Answers = Callable[[str, Any, bool], Answer]


def serve(port: int, answer: Answers) -> None:
    """Serve for ever; `answer` gets a path, a JSON body or None, and whether the router asks."""
    key = Path(os.environ["PDKIT_ENGINE_KEY_FILE"]).read_text().strip()
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            threading.Thread(
                target=_talk, args=(listener.accept()[0], key, answer), daemon=True
            ).start()


def _talk(connection: socket.socket, key: str, answer: Answers) -> None:
    """Answer the requests of one connection, until its client closes it or wants it closed."""
    with suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        while words := stream.readline().decode().split():
            headers = _headers(stream)
            sent = stream.read(int(headers.get("content-length", 0)))
            if words[1] == "/health" or headers.get("authorization") == f"Bearer {key}":
                # The router names each request; who asks directly does not.
                body = json.loads(sent) if words[0] == "POST" else None
                status, content = answer(words[1], body, "x-request-id" in headers)
            else:
                status, content = 401, "not without the key"
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            # In one packet: apart, the second waits for the client's delayed ACK, 40 ms.
            stream.write(
                f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
            stream.flush()
            if headers.get("connection", "").lower() == "close":
                return


def _headers(stream: BufferedRWPair) -> dict[str, str]:
    """Return the headers that come next, by their names in lower case."""
    lines = iter(lambda: stream.readline().decode("latin-1").rstrip("\r\n"), "")
    pairs = (line.partition(":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs}
