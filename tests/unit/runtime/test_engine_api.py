"""The client of engines and routers, against a real small HTTP server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.runtime import http_client
from deploy.runtime.engine_api import ApiError, CacheCounters, EngineApi, TimedOut
from tests.hostile_redis import Hostile, hostile

METRICS = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 96.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 904.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 512.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


@dataclass
class Engine:
    """A server that answers by a table and keeps what it was asked."""

    url: str
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    connections: int = 0

    def answer(self, path: str, body: object, status: int = 200) -> None:
        self.answers[path] = (status, body if isinstance(body, str) else json.dumps(body))


@pytest.fixture
def engine() -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which keeps connections

        def setup(self) -> None:
            super().setup()
            made.connections += 1

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: object) -> None:
            made.asked.append((self.path, body))
            status, text = made.answers.get(self.path, (404, "no such path"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Engine(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture
def api(engine: Engine) -> Iterator[EngineApi]:
    with EngineApi(engine.url) as client:
        yield client


class TestHealth:
    @pytest.mark.parametrize(
        ("status", "healthy"), [(200, True), (204, False), (404, False), (503, False)]
    )
    def test_only_200_is_healthy(
        self, engine: Engine, api: EngineApi, status: int, healthy: bool
    ) -> None:
        engine.answer("/health", "", status)
        assert api.is_healthy() is healthy

    def test_each_request_has_a_connection_of_its_own(self, engine: Engine, api: EngineApi) -> None:
        """An idle one may be closed by others as a request is sent on it."""
        engine.answer("/tokenize", {"tokens": [1, 2]})
        assert [api.tokenize("m", "ab") for _ in range(3)] == [[1, 2]] * 3
        assert engine.connections == 3

    def test_another_health_path_is_used(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/readiness", "")
        assert api.is_healthy("/readiness")
        assert not api.is_healthy("/health")

    def test_a_name_that_no_host_can_have(self) -> None:
        with EngineApi(f"http://{'a' * 64}.lan:8010") as api:
            assert not api.is_healthy()
            with pytest.raises(ApiError, match="no answer") as caught:
                api.metrics()
        assert caught.value.status == 0

    def test_a_refused_connection_is_not_healthy(self, free_port: int) -> None:
        with EngineApi(f"http://127.0.0.1:{free_port}") as api:
            assert not api.is_healthy()


class TestCounters:
    def test_cache_counters_are_read(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/metrics", METRICS)
        assert api.cache_counters() == CacheCounters(904, 512, 1000, 96)

    def test_counters_of_several_engine_cores_are_summed(
        self, engine: Engine, api: EngineApi
    ) -> None:
        twice = METRICS + "\n".join(
            line.replace('engine="0"', 'engine="1"')
            for line in METRICS.splitlines()
            if not line.startswith("#")
        )
        engine.answer("/metrics", twice + "\n")
        assert api.cache_counters() == CacheCounters(1808, 1024, 2000, 192)

    @pytest.mark.parametrize(
        "name", ["external_prefix_cache_queries", "external_prefix_cache_hits", "prefix_cache_hits"]
    )
    def test_a_missing_counter_is_an_error(self, engine: Engine, api: EngineApi, name: str) -> None:
        without = [line for line in METRICS.splitlines() if f"vllm:{name}_total" not in line]
        engine.answer("/metrics", "\n".join(without) + "\n")
        with pytest.raises(ApiError, match=f"vllm:{name}"):
            api.cache_counters()

    def test_zero_is_not_missing(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/metrics", METRICS.replace("512.0", "0.0"))
        assert api.cache_counters().external_hits == 0

    def test_counters_are_subtracted(self) -> None:
        later, earlier = CacheCounters(10, 8, 6, 4), CacheCounters(1, 2, 3, 4)
        assert later.since(earlier) == CacheCounters(9, 6, 3, 0)


COMPLETION: dict[str, Any] = {
    "choices": [
        {
            "logprobs": {
                "tokens": ["token_id:5", "token_id:6"],
                "top_logprobs": [
                    {"token_id:5": -0.1, "token_id:7": -2.5},
                    {"token_id:6": -0.2},
                ],
            }
        }
    ],
    "usage": {"prompt_tokens": 3},
}


class TestRequests:
    def test_complete_is_greedy_and_by_token_ids(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/v1/completions", COMPLETION)
        answer = api.complete("m", [1, 2, 3], max_tokens=2)
        assert answer.tokens == ("token_id:5", "token_id:6")
        assert answer.top_logprobs[0] == {"token_id:5": -0.1, "token_id:7": -2.5}
        assert answer.prompt_tokens == 3
        ((_, body),) = engine.asked
        assert body["model"] == "m"
        assert body["prompt"] == [1, 2, 3]
        assert body["temperature"] == 0
        assert body["max_tokens"] == 2
        assert body["logprobs"] >= 2
        assert body["return_tokens_as_token_ids"] is True

    def test_tokenize_adds_no_special_tokens(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/tokenize", {"tokens": [7, 8]})
        assert api.tokenize("m", "hi") == [7, 8]
        ((_, body),) = engine.asked
        assert body["add_special_tokens"] is False

    def test_max_model_len(self, engine: Engine, api: EngineApi) -> None:
        engine.answer("/v1/models", {"data": [{"id": "m", "max_model_len": 4096}]})
        assert api.max_model_len() == 4096

    def test_the_server_of_lmcache_tells_its_version_and_engines(
        self, engine: Engine, api: EngineApi
    ) -> None:
        engine.answer("/lmc_version", '"0.5.6"')
        engine.answer("/status", {"is_healthy": True, "registered_gpu_ids": [7, 2**62]})
        assert api.lmcache_version() == "0.5.6"
        assert api.known_engines() == [7, 2**62]


CALLS: dict[str, Callable[[EngineApi], object]] = {
    "/metrics": lambda api: api.cache_counters(),
    "/tokenize": lambda api: api.tokenize("m", "x"),
    "/v1/models": lambda api: api.max_model_len(),
    "/v1/completions": lambda api: api.complete("m", [1], max_tokens=1),
    "/status": lambda api: api.known_engines(),
}


@pytest.mark.parametrize("path", CALLS)
class TestFailures:
    @pytest.mark.parametrize("status", [201, 400, 404, 500, 503])
    def test_another_status_is_an_error_with_its_text(
        self, engine: Engine, api: EngineApi, path: str, status: int
    ) -> None:
        engine.answer(path, "what went wrong: " + "x" * 5000, status)
        with pytest.raises(ApiError, match=f"HTTP {status}: what went wrong") as caught:
            CALLS[path](api)
        assert caught.value.status == status
        assert len(str(caught.value)) < 1000

    def test_a_refused_connection_is_an_error(self, free_port: int, path: str) -> None:
        with EngineApi(f"http://127.0.0.1:{free_port}") as api:
            with pytest.raises(ApiError, match=f"no answer from .*{free_port}") as caught:
                CALLS[path](api)
            assert caught.value.status == 0

    @pytest.mark.parametrize(
        "text",
        ["<html>", '{"data": [], "choices": []}', "[" * 100_000],
        ids=["html", "empty", "levels"],
    )
    def test_200_with_something_else(
        self, engine: Engine, api: EngineApi, path: str, text: str
    ) -> None:
        engine.answer(path, text)
        with pytest.raises(ApiError):
            CALLS[path](api)


def test_an_invalid_number_is_an_error(engine: Engine, api: EngineApi) -> None:
    engine.answer("/v1/models", '{"data": [{"max_model_len": 1e999}]}')
    with pytest.raises(ApiError, match="OverflowError"):
        api.max_model_len()


def test_control_characters_of_an_answer_are_removed(engine: Engine, api: EngineApi) -> None:
    engine.answer("/v1/models", "\x1b[31mCUDA\x1b[0m is\x07 gone\x1b]0;title\r\n\tGröße", 500)
    with pytest.raises(ApiError) as caught:
        api.max_model_len()
    assert str(caught.value) == "HTTP 500: CUDA is gone0;title\n\tGröße"


def test_too_slow_is_not_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = threading.Event()
    monkeypatch.setattr(engine, "answers", Waiting(pause))
    with EngineApi(engine.url, timeout_s=0.1) as api, pytest.raises(TimedOut, match="Timeout"):
        api.max_model_len()
    with EngineApi(engine.url) as api, pytest.raises(TimedOut, match="Timeout"):
        api.complete("tiny", [1], max_tokens=1, timeout_s=0.1)
    pause.set()


class Waiting(dict[str, tuple[int, str]]):
    """Answers that come only when the event is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def get(self, *_: object) -> tuple[int, str]:
        self._event.wait(5)
        return 200, "{}"


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_the_environments_proxies_are_not_used(
    engine: Engine, free_port: int, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port}")
    engine.answer("/health", "")
    with EngineApi(engine.url) as api:
        assert api.is_healthy()


def test_an_answer_without_end(
    engine: Engine, api: EngineApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_ANSWER_BYTES", 1 << 20)
    engine.answer("/tokenize", "1" * (1 << 21))
    with pytest.raises(ApiError, match="more than 1 MiB"):
        api.tokenize("m", "x")


def test_an_answer_byte_by_byte_ends() -> None:
    """Each byte comes in time, and all of them do not."""

    def drip(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        for _ in range(500):
            if server.stopped.wait(0.01):
                return
            server.send(taker, b"1")

    with (
        hostile(drip) as server,
        EngineApi(f"http://{server.address}", timeout_s=0.5) as api,
        pytest.raises(TimedOut, match="took longer than"),
    ):
        api.max_model_len()
