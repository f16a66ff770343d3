"""A small HTTP server for the stand-ins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]


def serve(port: int, answer: Callable[[str, Any, bool], Answer]) -> None:
    """Serve forever; `answer` gets a path, a JSON body or None, and whether the router asks."""

    key = Path(os.environ["PDKIT_ENGINE_KEY_FILE"]).read_text().strip()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: apart, the second waits for the client's delayed ACK, 40 ms.
        wbufsize = -1

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            if self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}":
                # The router names each request; who asks directly does not.
                status, content = answer(self.path, body, "x-request-id" in self.headers)
            else:
                status, content = 401, "not without the key"
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
