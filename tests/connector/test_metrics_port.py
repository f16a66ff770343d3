"""The port with the metrics of LMCache's server: that page, as it is now, and no other."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer

import pytest
from pdkit_connector import metrics_port


class Pages(BaseHTTPRequestHandler):
    """Answers any path, and notes which were asked for."""

    asked: list[str]
    status = 200

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"chunks 3.0\n")

    do_POST = do_GET

    def log_message(self, *_):
        pass

    def address_string(self):
        return "socket"


@pytest.fixture
def pages(tmp_path):
    """Return a class whose instances answer on the socket `tmp_path / "pages"`."""
    answers = type("Answers", (Pages,), {"asked": []})
    with ThreadingUnixStreamServer(str(tmp_path / "pages"), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield answers
        server.shutdown()
        thread.join()


@pytest.fixture
def port(tmp_path):
    server = metrics_port.serve("127.0.0.1:0", str(tmp_path / "pages"))
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def asked(port, path="/metrics", method="GET"):
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_port_serves_the_page_of_the_socket(pages, port):
    assert asked(port) == (200, b"chunks 3.0\n")
    assert asked(port) == (200, b"chunks 3.0\n")
    assert pages.asked == ["/metrics", "/metrics"], "each time anew"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/config"),
        ("GET", "/metrics/../config"),
        ("POST", "/metrics/reset"),
        ("POST", "/pdkit/forget"),
        ("POST", "/metrics"),
    ],
)
def test_no_other_page_of_the_server_is_reachable(pages, port, method, path):
    assert asked(port, path, method)[0] in (404, 501)
    assert pages.asked == []


def test_a_server_that_is_not_there_has_no_page(port):
    assert asked(port)[0] == 503


def test_an_error_of_the_server_is_passed_on(pages, port):
    pages.status = 500
    assert asked(port)[0] == 500


def test_a_server_that_hangs_has_no_page(tmp_path, port, monkeypatch):
    monkeypatch.setattr(metrics_port, "_LIMIT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "pages"))
        silent.listen()
        assert asked(port)[0] == 503


def closed(connection):
    connection.settimeout(30)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_the_number_of_connections_is_limited(pages, port, monkeypatch):
    monkeypatch.setattr(metrics_port._Page, "timeout", None)  # none of them is closed for its age
    with contextlib.ExitStack() as held:
        for _ in range(metrics_port._AT_ONCE):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port)) as another:
            assert closed(another)
    while True:  # the last of them are noticed to have gone
        with contextlib.suppress(OSError, HTTPException):
            assert asked(port) == (200, b"chunks 3.0\n")
            return


def test_a_slow_client_is_disconnected(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr(metrics_port, "Timer", lambda _s, do, what: Later(ends, do, what))
    server = metrics_port.serve("127.0.0.1:0", str(tmp_path / "pages"))
    with server, socket.create_connection(server.server_address) as slow:
        slow.sendall(b"GET /metr")
        while not ends:
            time.sleep(0.01)
        ends.pop()()
        assert closed(slow)
        server.shutdown()


class Later:
    """A timer that runs out when the test says so."""

    def __init__(self, ends, do, what):
        self.start = lambda: ends.append(lambda: do(*what))

    def cancel(self):
        pass


def test_a_client_that_disconnects_is_not_logged(port, monkeypatch, capfd):
    done, shut = threading.Event(), metrics_port._Server.shutdown_request
    monkeypatch.setattr(
        metrics_port._Server, "shutdown_request", lambda *given: (shut(*given), done.set())
    )
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /metrics HTTP/1.1")
    assert done.wait(30)
    assert capfd.readouterr().err == ""


def test_a_taken_port_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            metrics_port.serve(f"127.0.0.1:{taken.getsockname()[1]}", "pages")
