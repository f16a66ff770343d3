"""An engine that is about to end waits for its requests, and not for what will never come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pdkit_connector import drain

KEY = "engines-only"
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0
"""


class Engine(HTTPServer):
    """An engine's metrics page; each time it is read, one request has ended."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.running, self.waiting, self.read = 0, 0, 0


class Page(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        engine = self.server
        known = self.headers["Authorization"] == f"Bearer {KEY}"
        self.send_response(200 if known and self.path == "/metrics" else 401)
        self.end_headers()
        page = PAGE.format(running=float(engine.running), waiting=float(engine.waiting))
        self.wfile.write(page.encode())
        engine.read += 1
        if engine.waiting:
            engine.waiting -= 1
        elif engine.running:
            engine.running -= 1

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("PDKIT_ENGINE_KEY_FILE", str(tmp_path / "key"))
    with Engine() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_an_engine_waits_for_running_and_queued_requests_before_it_ends(engine: Engine) -> None:
    engine.running, engine.waiting = 1, 2
    slept: list[float] = []
    assert drain.wait(engine.server_port, 60, slept.append)
    assert engine.read == 4
    assert slept == [35, 1, 1, 1], "for routers, then until all have ended"


def test_an_engine_ends_at_its_time_limit(engine: Engine) -> None:
    engine.running = 100
    seconds = iter(range(100))
    assert not drain.wait(engine.server_port, 4, lambda _: None, lambda: next(seconds))
    assert engine.read == 3


def test_a_busy_engine_is_not_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([TimeoutError(), 0.0])

    def requests_of(_: int) -> float:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(drain, "requests_of", requests_of)
    assert drain.wait(1, 60, lambda _: None)
    assert next(answers, None) is None, "it was asked again"


def test_a_dead_engine_is_not_waited_for(engine: Engine) -> None:
    port = engine.server_port
    engine.server_close()
    assert drain.wait(port, 60, lambda _: None)
    assert engine.read == 0
