"""A hub of models of pretence, on the loopback address."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 8192,
}


@dataclass
class Hub:
    """What is asked of it, and what it answers.

    Attributes:
        asked: (path, Authorization) of each request.
        files: of a whole model, beside the body; with them it answers as the hub's client asks.
        cut: a file of which half is sent before the connection ends.
        sizes: sizes that the hub gives for files, such as of weights that no test can hold.
    """

    address: str = ""
    status: int = 200
    body: bytes = json.dumps(LLAMA).encode()
    headers: dict[str, str] = field(default_factory=lambda: {"X-Repo-Commit": COMMIT})
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    cut: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    def listing(self, path: str) -> bytes:
        """Return what the hub tells of the model: itself, or its tree of files."""
        tree = [
            {"type": "file", "path": name, "size": len(content), "oid": COMMIT}
            for name, content in self.files.items()
        ]
        model = {
            "id": "owner/70b",
            "sha": COMMIT,
            "siblings": [
                {"rfilename": name, "size": self.sizes.get(name, len(content))}
                for name, content in self.files.items()
            ],
        }
        return json.dumps(tree if "/tree/" in path else model).encode()


@contextmanager
def open_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers["Authorization"]))
            if hub.files:
                name = self.path.rpartition("/")[2]
                listing = self.path.startswith("/api/")
                self.send_file(hub.listing(self.path) if listing else hub.files.get(name), name)
                return
            moved = self.path.startswith("/elsewhere")
            self.send_response(200 if moved else hub.status)
            for name, value in ({} if moved else hub.headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(hub.body)))
            self.end_headers()
            self.wfile.write(hub.body)

        def send_file(self, content: bytes | None, name: str) -> None:
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("ETag", f'"{len(content)}-{name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[: len(content) // 2] if name == hub.cut else content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
