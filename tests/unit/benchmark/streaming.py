"""A server that streams completions, in lockstep with the client's clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
_HANGS_S = 20.0


class Clock:
    """What the client takes for time: it stands still until the server moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls = 0

    def perf_counter(self) -> float:
        self.calls += 1
        return self.now

    @staticmethod
    def process_time() -> float:
        return time.process_time()

    def await_call(self, after: int) -> None:
        """Wait until the client has looked at the clock."""
        until(lambda: self.calls > after)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _HANGS_S
    while not condition():
        assert time.monotonic() < deadline, "the other side hangs"
        time.sleep(0.0005)


@dataclass
class Stage:
    """What the server got, and what it answers.

    Attributes:
        gaps: seconds before each token, by the clock; the first is the TTFT.
        events: what is streamed instead of tokens, if given.
    """

    clock: Clock = field(default_factory=Clock)
    gaps: Sequence[float] = (0.25, 0.05, 0.5)
    events: Sequence[bytes] | None = None
    status: int = 200
    bodies: list[Body] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    url: str = ""

    def token(self, number: int, *, chat: bool) -> bytes:
        choice: Body = {"index": 0, "text": "x", "token_ids": [1000 + number]}
        if chat:
            choice = {"index": 0, "delta": {"content": "x"}}
        return event({"choices": [choice]})

    def closing(self, body: Body) -> list[bytes]:
        prompt = body.get("prompt") or body["messages"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self.gaps)}
        return [event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@contextmanager
def serving(stage: Stage) -> Iterator[Stage]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stage.bodies.append(body)
            stage.paths.append(self.path)
            stage.keys.append(self.headers["Authorization"])
            stage.before()
            if stage.status != 200:
                self._plain(stage.status, b'{"error": {"message": "out of order"}}')
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if stage.events is not None:
                self._chunk(b"".join(stage.events))
            else:
                self._tokens(body)
            self.wfile.write(b"0\r\n\r\n")

        def _tokens(self, body: Body) -> None:
            chat = "messages" in body
            if chat:
                self._step(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
            for number, gap in enumerate(stage.gaps):
                stage.clock.now += gap
                self._step(stage.token(number, chat=chat))
            stage.clock.now += 9.0  # what comes after the last token is no latency
            self._chunk(b"".join(stage.closing(body)))

        def _step(self, data: bytes) -> None:
            seen = stage.clock.calls
            self._chunk(data)
            stage.clock.await_call(seen)

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _plain(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that left
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stage.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stage
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
