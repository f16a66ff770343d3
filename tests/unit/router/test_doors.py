"""What is let in, over raw connections: what reaches an engine, and what the others are told."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.unit.router.conftest import Router, Start
from tests.unit.router.stand_in import Seen

BODY = b'{"prompt": "x"}'


def head(first: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    given = [f"Host: {host}", *lines] if host else list(lines)
    return "\r\n".join([f"{first} HTTP/1.1", *given, "", ""]).encode("latin-1")


def post(
    *lines: str, body: bytes = BODY, path: str = "/v1/completions", host: str = "127.0.0.1"
) -> bytes:
    return head(f"POST {path}", f"Content-Length: {len(body)}", *lines, host=host) + body


@contextlib.contextmanager
def connected(router: Router) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", router.port), timeout=20) as opened:
        yield opened


def answers(router: Router, sent: bytes, within_s: float = 10) -> list[tuple[int, bytes]]:
    """Send bytes, end, and return status and body of each answer."""
    with connected(router) as opened:
        with contextlib.suppress(OSError):
            opened.sendall(sent)
        data = b""
        opened.settimeout(within_s)
        with contextlib.suppress(OSError):
            while piece := opened.recv(65536):
                data += piece
                if complete(data):
                    break
    return list(split(data))


def complete(data: bytes) -> bool:
    found = list(split(data))
    return bool(found) and found[-1][0] != 100


def split(data: bytes) -> Iterator[tuple[int, bytes]]:
    while b"\r\n\r\n" in data:
        top, _, rest = data.partition(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in top.split(b"\r\n")
                if line.startswith(b"content-length")
            ),
            0,
        )
        if len(rest) < length:
            return
        yield int(top.split()[1]), rest[:length]
        data = rest[length:]


def reached(router: Router) -> list[Seen]:
    """Return what engines were sent, without what the router asks for itself."""
    return [seen for engine in router.engines for seen in engine.seen if seen.method == "POST"]


ADMINISTRATION = [
    "POST /remove_worker?url=http://x", "POST /add_worker", "DELETE /workers/x", "GET /workers",
    "POST /flush_cache", "POST /scale_elastic_ep", "POST /collective_rpc", "POST /sleep",
    "POST /reset_prefix_cache", "GET /metrics", "GET /docs", "GET /openapi.json", "GET /version",
    "POST /v1/load_lora_adapter", "POST /invocations", "POST /v1/responses/x/cancel",
    "GET /v1/completions/", "GET /", "OPTIONS /", "TRACE /other",
]  # fmt: skip
DISGUISED = [
    "POST http://127.0.0.1/v1/completions", "POST //v1/completions", "POST /v1/../v1/completions",
    "POST /v1/completions/", "POST /v1%2Fcompletions", "POST /%76%31/completions",
    "POST /V1/completions", "POST /v1/completions;x", "POST /v1/completions%00",
    "POST /v1/completions#x", "POST \\v1\\completions", "POST /v1/./completions",
]  # fmt: skip


@pytest.mark.parametrize("first", [*ADMINISTRATION, *DISGUISED])
def test_other_paths_are_closed(router: Router, first: str) -> None:
    ((status, body),) = answers(router, head(first, "Content-Length: 0"))
    assert status in (400, 404)
    assert "error" in json.loads(body)
    assert not reached(router)
    assert not any("remove" in seen.path for engine in router.engines for seen in engine.seen)


OTHER_METHODS = [
    "GET /v1/completions", "PUT /v1/completions", "HEAD /health", "POST /v1/models", "POST /health",
    "OPTIONS /v1/models",
]  # fmt: skip


@pytest.mark.parametrize("first", OTHER_METHODS)
def test_other_methods_are_closed(router: Router, first: str) -> None:
    ((status, body),) = answers(router, head(first, "Content-Length: 0"))
    assert status == 405
    assert "is served with" in json.loads(body)["error"]["message"]


def test_a_query_string_is_not_passed_on(router: Router) -> None:
    ((status, _),) = answers(router, post(path="/v1/completions?api-version=1"))
    assert status == 200
    assert {seen.path for seen in reached(router)} == {"/v1/completions"}


def test_the_body_of_a_get_is_not_passed_on(router: Router) -> None:
    smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = head("GET /v1/models", f"Content-Length: {len(smuggled)}") + smuggled
    ((status, _),) = answers(router, sent)
    assert status == 200
    assert not reached(router)
    assert all(seen.body == b"" for engine in router.engines for seen in engine.seen)


LOCAL = ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]", "192.0.2.7:80"]
FOREIGN = [
    "llm.example",
    "llm.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.example",
    "x",
]


@pytest.mark.parametrize("host", LOCAL)
def test_host_headers_that_no_site_can_have_are_accepted(router: Router, host: str) -> None:
    assert answers(router, post(host=host))[0][0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_rebound_name_is_refused(router: Router, host: str) -> None:
    assert answers(router, post(host=host))[0][0] == 403
    assert not reached(router)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1", 200), ("http://127.0.0.1:3000", 403), ("https://evil.example", 403),
     ("null", 403), ("", 403)],
)  # fmt: skip
def test_requests_from_other_origins_are_refused(router: Router, origin: str, status: int) -> None:
    sent = post(f"Origin: {origin}", "Content-Type: text/plain")
    assert answers(router, sent)[0][0] == status
    assert bool(reached(router)) == (status == 200)


REFUSED = {
    "no host": (head("GET /health", host=""), 400),
    "two hosts": (head("GET /health", "Host: localhost"), 400),
    "two lengths": (head("POST /v1/completions", "Content-Length: 0", "Content-Length: 5"), 400),
    "a length and chunks": (post("Transfer-Encoding: chunked"), 400),
    "chunks and a length": (
        head("POST /v1/completions", "Transfer-Encoding: chunked", "Content-Length: 5")
        + b"0\r\n\r\n",
        400,
    ),
    "chunks and more": (
        head("POST /v1/completions", "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
        400,
    ),
    "gzip in chunks": (
        head("POST /v1/completions", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
        501,
    ),
    "a strange length": (head("POST /v1/completions", "Content-Length: +5") + BODY, 400),
    "a negative length": (head("POST /v1/completions", "Content-Length: -5") + BODY, 400),
    "a huge length": (head("POST /v1/completions", "Content-Length: 99999999999"), 413),
    "a strange chunk": (
        head("POST /v1/completions", "Transfer-Encoding: chunked") + b"0x5\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    "a bare line feed": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    "a space before the colon": (head("GET /health", "X-A : b"), 400),
    "a folded header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n c\r\n\r\n", None),
    "gzip": (post("Content-Encoding: gzip"), 415),
    "an upgrade": (post("Connection: Upgrade", "Upgrade: h2c"), 400),
    "a tunnel": (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a large head": (head("GET /health", "X-A: " + "a" * 40000), 431),
    "many headers": (head("GET /health", *(f"X-{n}: b" for n in range(200))), 431),
    "no end of a head": (head("GET /health", "X-A: " + "a" * 100000)[:-4], 431),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_are_refused(router: Router, name: str) -> None:
    sent, expected = REFUSED[name]
    found = answers(router, sent)
    if expected is not None:
        ((status, body),) = found
        assert status == expected, body
        assert json.loads(body)["error"]["code"] == expected
    assert not reached(router)


def test_a_pipelined_second_request_is_not_served(router: Router) -> None:
    """The first is answered, and the connection closed: nobody serves the second."""
    found = answers(router, post() + post())
    assert [status for status, _ in found] == [200]
    assert len(reached(router)) == 2, "the two phases of one"


def test_a_connection_serves_several_requests(router: Router) -> None:
    with connected(router) as opened:
        for _ in range(3):
            opened.sendall(post())
            data = b""
            while not complete(data):
                piece = opened.recv(65536)
                assert piece, "the connection was closed"
                data += piece
            assert data.startswith(b"HTTP/1.1 200")


def test_a_client_that_expects_100_continue_is_served(router: Router) -> None:
    with connected(router) as opened:
        opened.sendall(head("POST /v1/completions", "Content-Length: 2", "Expect: 100-continue"))
        assert opened.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        opened.sendall(b"{}")
        assert opened.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_http_1_0_client_is_served(router: Router) -> None:
    sent = post(body=b'{"stream": true}').replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(router) as opened:
        opened.sendall(sent)
        data = b""
        while piece := opened.recv(65536):
            data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in top
    assert body.endswith(b"data: [DONE]\n\n")


BODIES = {
    "no JSON": b"{",
    "nothing": b"",
    "no object": b"[1]",
    "not a number": b'{"temperature": NaN}',
    "infinite": b'{"temperature": -Infinity}',
    "too large a number": b'{"temperature": 1e999}',
    "too many digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "half of another encoding": '{"prompt": "x"}'.encode("utf-16")[:-1],
    "two byte order marks": 2 * b"\xef\xbb\xbf" + b"{}",
    "levels": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "two objects": b"{}{}",
    "a control character": b'{"prompt": "\x00"}',
    "many values": b'{"messages": [{"content": [' + b"1," * 9000 + b"1]}]}",
    "negative token ids": b'{"prompt": [' + b"-1," * 9000 + b"1]}",
    "many prompts": b'{"prompt": [' + b"[1]," * 9000 + b"[1]]}",
    "many lists": b'{"prompt": [' + b"[]," * 20000 + b"[]]}",
    "many objects": b'{"messages": [' + b'{"\\"": "]"},' * 20000 + b"{}]}",
    "many fields": b"{" + b",".join(b'"%d": 0' % number for number in range(9000)) + b"}",
    "too large a whole number": b'{"prompt": "x", "top_k": 1000000000000000000000000000000}',
    "too small a token id": b'{"prompt": [-9223372036854775809]}',
    "options that are none": b'{"prompt": "x", "stream_options": 5}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_invalid_bodies_are_refused_by_the_router(router: Router, name: str, path: str) -> None:
    before = router.count("requests")
    ((status, body),) = answers(router, post(body=BODIES[name], path=path))
    assert router.count("requests") == before
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert not reached(router)


def test_a_body_larger_than_the_limit_is_refused(start_router: Start) -> None:
    """In one piece or many."""
    router = start_router("--max-body-mib", "1")
    large = b'{"prompt": "' + b"a" * 2**20 + b'"}'
    assert answers(router, post(body=large))[0][0] == 413
    chunk = b"%x\r\n%b\r\n" % (2**16, b"a" * 2**16)
    chunked = head("POST /v1/completions", "Transfer-Encoding: chunked") + 20 * chunk
    assert answers(router, chunked)[0][0] == 413
    assert not reached(router)
    fits = b'{"prompt": "' + b"a" * (2**20 - 100) + b'"}'
    assert answers(router, post(body=fits))[0][0] == 200
