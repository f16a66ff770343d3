"""What an engine does with requests that do not show the stack's key."""

from __future__ import annotations

import asyncio
import json

import pytest
from pdkit_connector import serve
from pdkit_connector.engine_key import FILE_ENV, MIDDLEWARE, RequireKey, read_key
from pdkit_connector.errors import ConnectorError

KEY = "k" * 43
RIGHT = [(b"authorization", f"Bearer {KEY}".encode())]


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    file = tmp_path / "engine_key"
    file.write_text(KEY + "\n")
    monkeypatch.setenv(FILE_ENV, str(file))
    return file


def answered(path="/v1/completions", headers=(), method="POST", kind="http", **more):
    """Return the messages of an answer; [] where the engine behind was reached."""
    sent, reached = [], []

    async def engine(scope, _receive, _send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers), "method": method, **more}
    asyncio.run(RequireKey(engine)(scope, None, send))
    assert bool(reached) != bool(sent), "either the engine answers, or the key's guard"
    return sent


def test_every_path_is_served_with_the_key():
    for path in ("/v1/completions", "/metrics", "/tokenize", "/collective_rpc"):
        assert not answered(path, RIGHT)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
        [(b"authorization", f"Bearer {KEY}x".encode())],
        [(b"authorization", "Bearer \xfc".encode("latin-1"))],
        [(b"authorization", b"Bearer no"), *RIGHT],
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health/../metrics", "//health", "/"])
def test_requests_without_the_key_get_401(path, headers):
    start, body = answered(path, headers, method="GET")
    assert start["status"] == 401
    assert "router" in json.loads(body["body"])["error"]["message"]
    assert KEY.encode() not in body["body"]


def test_requests_of_every_method_need_the_key():
    assert answered("/v1/models", method="OPTIONS")[0]["status"] == 401
    assert answered("/health", method="POST")[0]["status"] == 401


def test_health_needs_no_key():
    assert not answered("/health", method="GET")
    assert not answered("/below/health", method="GET", root_path="/below")


def test_websockets_need_the_key():
    assert answered("/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert answered("/health", kind="websocket")
    assert not answered("/v1/realtime", RIGHT, kind="websocket")


def test_startup_and_shutdown_events_pass():
    assert not answered(kind="lifespan")


@pytest.mark.parametrize("damage", ["missing", "empty", "unnamed", "not ASCII"])
def test_an_engine_without_a_key_file_serves_nothing(file, monkeypatch, damage):
    if damage == "missing":
        file.unlink()
    elif damage == "unnamed":
        monkeypatch.delenv(FILE_ENV)
    else:
        file.write_text("\n" if damage == "empty" else "schlüssel")
    with pytest.raises(ConnectorError, match=FILE_ENV):
        read_key()
    with pytest.raises(ConnectorError, match=FILE_ENV):
        serve.check(["--middleware", MIDDLEWARE])
    with pytest.raises(ConnectorError, match=FILE_ENV):
        answered("/health")
