"""A Docker engine of pretence on a socket, which answers pings and hangs where it is asked more."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

_ANSWERS = {"/_ping": b"OK", "/version": b'{"ApiVersion": "1.44", "Version": "28.0.1"}'}


@contextmanager
def hanging_engine(path: Path, status: int = 200, **more: bytes) -> Iterator[str]:
    """Serve at a path, `more` pages too, with a status; return the address for DOCKER_HOST."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/" in self.headers["Host"]:
                self.send_error(400, "malformed Host header")
                return
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            path, _, _ = self.path.partition("?")
            known = [body for end, body in _ANSWERS.items() if path.endswith(end)]
            told = [body for end, body in more.items() if path.endswith(f"/{end}")]
            if not known + told:
                over.wait(30)
                return
            self.send_response(200 if known else status)
            self.send_header("Content-Length", str(len((known + told)[0])))
            self.end_headers()
            self.wfile.write((known + told)[0])

        do_POST = do_GET

        def address_string(self) -> str:
            return "the client"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"unix://{path}"
        over.set()
        server.shutdown()
