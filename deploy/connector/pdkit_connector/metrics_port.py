"""LMCache's metrics page on a port, for Prometheus, which scrapes no Unix socket.

The port has that page and nothing else: the socket also has an API that can empty the cache. The
page is asked for there at each scrape. One that was made here could mix with another reading of it,
and would be there even if LMCache hangs. Any user of the machine may connect, and a connection
takes a thread and a file descriptor of LMCache's server: they are few and short.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Thread, Timer
from typing import Any

ADDRESS_ENV = "PDKIT_METRICS_ADDRESS"
PAGE = "/metrics"
# A scrape ends after ten.
_LIMIT_S = 8.0
_AT_ONCE = 8


def serve(address: str, pages: str) -> ThreadingTCPServer:
    """Serve the page of a socket on HOST:PORT, in a thread of its own.

    Raises:
        OSError: the port is taken.
    """
    host, _, port = address.rpartition(":")
    server = _Server((host, int(port)), partial(_Page, pages))
    Thread(target=server.serve_forever, name="pdkit-metrics", daemon=True).start()
    return server


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, *address_and_handler: Any) -> None:
        self._free = BoundedSemaphore(_AT_ONCE)
        super().__init__(*address_and_handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it if there are enough."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, however slow its client is, for twice the time of LMCache."""
        over = Timer(2 * _LIMIT_S, _end, (request,))
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Log nothing: clients may disconnect at any time."""


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Page(BaseHTTPRequestHandler):
    timeout = _LIMIT_S  # of a client that sends nothing

    def __init__(self, pages: str, *rest: Any) -> None:
        self._pages = pages
        super().__init__(*rest)

    def do_GET(self) -> None:
        """Answer with the page; 404 for any other, 503 where LMCache does not answer."""
        if self.path != PAGE:
            self.send_error(404)
            return
        try:
            status, text = _read(self._pages)
        except (OSError, HTTPException):
            self.send_error(503)
            return
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing: there is a request every ten seconds."""


def _read(pages: str) -> tuple[int, bytes]:
    connection = HTTPConnection("localhost")
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.settimeout(_LIMIT_S)
        connection.sock.connect(pages)
        connection.request("GET", PAGE)
        answer = connection.getresponse()
        return answer.status, answer.read()
