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
def hanging_engine(path: Path, **more: bytes) -> Iterator[str]:
    """Serve at a path, `more` pages too; return the address, as DOCKER_HOST names it."""
    answers = _ANSWERS | {f"/{name}": body for name, body in more.items()}
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/" in self.headers["Host"]:
                self.send_error(400, "malformed Host header")
                return
            path, _, _ = self.path.partition("?")
            known = [body for end, body in answers.items() if path.endswith(end)]
            if not known:
                over.wait(30)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(known[0])))
            self.end_headers()
            self.wfile.write(known[0])

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
