"""What becomes of a request: two phases, and other engines where one is lost."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.unit.router import stand_in
from tests.unit.router.conftest import DISAGGREGATED, Router, Start
from tests.unit.router.stand_in import DONE, EVENTS, StandIn

Eventually = Callable[..., None]
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 5, "temperature": 0}
TRACED = {"x-pdkit-trace": "1"}


def asked(*engines: StandIn) -> list[str]:
    """Return the engines that were sent a request, one name for each."""
    return [engine.name for engine in engines for seen in engine.seen if seen.method == "POST"]


def the_two(router: Router, answer: httpx.Response) -> tuple[StandIn, StandIn]:
    """Return the producer and the consumer that the trace of an answer names."""
    parts = dict(part.split("=") for part in answer.headers["x-pdkit-trace"].split("; "))
    by_name = {engine.name: engine for engine in router.engines}
    return by_name[parts["producer"]], by_name[parts["consumer"]]


def test_prefill_is_sent_before_the_request(router: Router) -> None:
    raw = b'{ "model":"m",  "prompt":"x","max_tokens":5,"stream_options":{"a":1}, "stream":false }'
    answer = router.client.post(
        COMPLETIONS, content=raw, headers={"content-type": "application/json", **TRACED}
    )
    producer, consumer = the_two(router, answer)
    assert answer.json()["by"] == consumer.name
    (first,), (second,) = producer.seen, consumer.seen
    assert first.json == {
        "model": "m", "prompt": "x", "max_tokens": 1, "stream": False, "stream_options": None,
    }  # fmt: skip
    assert second.body == raw, "passed on to the byte"
    assert first.path == second.path == COMPLETIONS
    assert first.headers["content-type"] == second.headers["content-type"] == "application/json"
    assert asked(*router.engines) == [producer.name, consumer.name]


def test_both_phases_have_the_same_request_id(router: Router) -> None:
    answer = router.client.post(COMPLETIONS, json=BODY, headers={"x-request-id": "mine-1"})
    names = {seen.headers["x-request-id"] for engine in router.engines for seen in engine.seen}
    assert names == {"mine-1"}
    assert answer.headers["x-request-id"] == "mine-1"
    assert "x-pdkit-trace" not in answer.headers, "only for who asks"


@pytest.mark.parametrize("count", [1, 2])
def test_connections_that_were_closed_meanwhile_are_not_lost_engines(
    start_router: Start, count: int
) -> None:
    """Where there is one engine, or both closed theirs, requests would be refused."""
    router = start_router(
        names=[f"{role}-{n}" for role in ("producer", "consumer") for n in range(count)]
    )
    for engine in router.engines:
        engine.once = True
    answers = [router.client.post(COMPLETIONS, json=BODY).status_code for _ in range(20)]
    assert answers == [200] * 20
    assert router.count("degraded") == 0


class TestCachedTokens:
    """What the engine says of them: before a whole answer, and behind a stream's usage."""

    USAGE = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":512}}}\n\n'

    async def counts(self, _: StandIn, to: stand_in.Connection) -> None:
        await to.begin()
        await to.piece(EVENTS[0])
        await to.piece(self.USAGE[:50])  # the event is whole in the end only
        await to.piece(self.USAGE[50:] + DONE)
        await to.send(b"0\r\n\r\n")

    def test_cached_tokens_are_in_the_trace_of_a_whole_answer(self, router: Router) -> None:
        answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
        assert answer.headers["x-pdkit-trace"].endswith("; tries=2; cached=7")

    def test_cached_tokens_follow_the_usage_of_a_stream(self, router: Router) -> None:
        for consumer in router.consumers:
            consumer.does = self.counts
        body = {**BODY, "stream": True}
        traced = router.client.post(COMPLETIONS, json=body, headers=TRACED)
        assert "cached" not in traced.headers["x-pdkit-trace"], "it was not known yet"
        comment = f": x-pdkit-trace {traced.headers['x-pdkit-trace']}; cached=512\n\n".encode()
        assert traced.content == EVENTS[0] + self.USAGE + comment + DONE
        plain = router.client.post(COMPLETIONS, json=body)
        assert plain.content == EVENTS[0] + self.USAGE + DONE, "only for who asks"

    def test_cached_tokens_of_anthropics_api_are_found(self, router: Router) -> None:
        usage = b'event: message_delta\ndata: {"usage":{"cache_read_input_tokens":512}}\n\n'
        end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

        async def counts(_: StandIn, to: stand_in.Connection) -> None:
            await to.begin()
            await to.piece(usage + end)
            await to.send(b"0\r\n\r\n")

        for consumer in router.consumers:
            consumer.does = counts
        body = {**BODY, "stream": True}
        answer = router.client.post("/v1/messages", json=body, headers=TRACED)
        told = answer.headers["x-pdkit-trace"]
        assert answer.content == usage + f": x-pdkit-trace {told}; cached=512\n\n".encode() + end

    def test_cached_tokens_in_a_text_are_ignored(self, router: Router) -> None:
        async def quotes(_: StandIn, to: stand_in.Connection) -> None:
            await to.whole(200, json.dumps({"text": '"cached_tokens": 9'}).encode())

        for consumer in router.consumers:
            consumer.does = quotes
        answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
        assert "cached" not in answer.headers["x-pdkit-trace"]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", "a\tb"])
def test_an_invalid_request_id_is_replaced(router: Router, name: str) -> None:
    headers = [(b"x-request-id", name.encode())]
    answer = router.client.post(COMPLETIONS, json=BODY, headers=headers)
    assert len(answer.headers["x-request-id"]) == 32


def test_client_headers_are_not_passed_on(router: Router) -> None:
    headers = {"authorization": "Bearer x", "cookie": "a=b", "x-data-parallel-rank": "1"}
    router.client.post(COMPLETIONS, json=BODY, headers=headers)
    for engine in router.engines:
        for seen in engine.seen:
            assert seen.headers.keys() == {"host", "content-type", "x-request-id", "content-length"}


def test_events_are_passed_on_one_by_one(router: Router) -> None:
    for consumer in router.consumers:
        consumer.does = stand_in.waits_between_events
    with router.client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = answer.iter_raw()
        assert next(pieces) == EVENTS[0]
        for consumer in router.consumers:
            consumer.go.set()
        assert b"".join(pieces) == b"".join((*EVENTS[1:], DONE))
    assert answer.is_success


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_other_apis_have_both_phases(router: Router, path: str) -> None:
    answer = router.client.post(path, json={"model": "m"}, headers=TRACED)
    producer, consumer = the_two(router, answer)
    assert [producer.seen[0].path, consumer.seen[0].path] == [path, path]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"]
)
def test_other_paths_are_answered_by_one_engine(router: Router, path: str) -> None:
    router.client.post(path, json={"model": "m", "input": "x"}).raise_for_status()
    ((seen, *more),) = [engine.seen for engine in router.engines if engine.seen]
    assert (seen.path, seen.json, more) == (path, {"model": "m", "input": "x"}, [])


def test_models_are_listed(router: Router) -> None:
    assert router.client.get("/v1/models").json()["data"][0]["id"] == "m"


def test_an_engines_error_is_passed_on(router: Router) -> None:
    """By the consumer, which sees the request as the client wrote it."""
    for engine in router.engines:
        engine.does = stand_in.refuses
    answer = router.client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "bad temperature"
    assert len(asked(*router.engines)) == 2, "it is as wrong elsewhere"


class TestWhereAnEngineIsLost:
    @pytest.mark.parametrize("fault", ["fails", "breaks_off", "answers_half"])
    @pytest.mark.parametrize("role", ["producers", "consumers"])
    def test_a_lost_request_is_sent_to_another_engine(
        self, router: Router, role: str, fault: str
    ) -> None:
        broken, other = getattr(router, role)
        broken.does = getattr(stand_in, fault)
        for _ in range(4):
            answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
            assert answer.status_code == 200
            assert other in the_two(router, answer)
        assert asked(broken), "or nothing was tried"

    @pytest.mark.parametrize("role", ["producers", "consumers"])
    def test_a_killed_engine_is_replaced_by_another(
        self, router: Router, role: str, eventually: Eventually
    ) -> None:
        broken, other = getattr(router, role)
        for _ in range(4):
            router.client.post(COMPLETIONS, json=BODY)  # so that there are connections
        broken.kill()
        try:
            for _ in range(4):
                answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
                assert answer.status_code == 200
                assert other in the_two(router, answer)
            counts = (1, 2) if role == "producers" else (2, 1)
            eventually(lambda: router.ready(*counts))
        finally:
            broken.start()
        eventually(router.ready)

    def test_a_stream_that_has_not_begun_is_sent_to_another_engine(self, router: Router) -> None:
        broken, _ = router.consumers
        broken.does = stand_in.breaks_off
        for _ in range(4):
            answer = router.client.post(COMPLETIONS, json={**BODY, "stream": True})
            assert answer.content == b"".join((*EVENTS, DONE))
        assert asked(broken)

    def test_a_stream_that_has_begun_ends_with_an_error(self, router: Router) -> None:
        """After a whole event, and never with tokens twice."""
        before = router.count("errors")
        for consumer in router.consumers:
            consumer.does = stand_in.streams_half
            consumer.go.set()
        answer = router.client.post(COMPLETIONS, json={**BODY, "stream": True})
        first, second, rest = answer.content.split(b"\n\n")
        assert (first + b"\n\n", rest) == (EVENTS[0], b"")
        error = json.loads(second.removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert "not complete" in error["message"]
        assert len(asked(*router.consumers)) == 1
        assert router.count("errors") == before + 1

    def test_clients_of_anthropics_api_read_the_error_of_a_stream(self, router: Router) -> None:
        """They skip events without a name."""
        for consumer in router.consumers:
            consumer.does = stand_in.streams_half
            consumer.go.set()
        answer = router.client.post("/v1/messages", json={**BODY, "stream": True})
        name, data = answer.content.split(b"\n\n")[1].split(b"\n")
        assert name == b"event: error"
        event = json.loads(data.removeprefix(b"data: "))
        assert event["type"] == "error"
        assert "not complete" in event["error"]["message"]

    @pytest.mark.parametrize(
        ("fault", "most", "status", "retry"),
        [
            ("fails", 1, 500, None),
            ("fails_for_good", 1, 500, None),
            ("breaks_off", 2, 503, "1"),
            ("dies", 1, 500, None),
        ],
    )
    def test_a_request_that_breaks_engines_does_not_reach_all(
        self, start_router: Start, fault: str, most: int, status: int, retry: str | None
    ) -> None:
        """One that broke off on an old connection, and lives, is asked once more on a new one."""
        router = start_router(names=(*DISAGGREGATED, "consumer-2"))
        for consumer in router.consumers:
            consumer.does = getattr(stand_in, fault)
        answer = router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == status
        assert answer.headers.get("retry-after") == retry
        assert "error" in answer.json()
        times = Counter(asked(*router.consumers))
        assert len(times) == 2, "the third is spared"
        assert max(times.values()) <= most

    def test_an_error_of_the_only_consumer_is_passed_on_unless_it_has_died(
        self, start_router: Start
    ) -> None:
        router = start_router(names=("producer-0", "consumer-0"))
        (consumer,) = router.consumers
        consumer.does = stand_in.fails
        assert router.client.post(COMPLETIONS, json=BODY).status_code == 500
        consumer.does = stand_in.fails_for_good
        answer = router.client.post(COMPLETIONS, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    def test_an_engine_that_is_not_healthy_is_left_out(
        self, router: Router, eventually: Eventually
    ) -> None:
        router.consumers[0].healthy = False
        eventually(lambda: router.ready(2, 1))
        for _ in range(4):
            assert router.client.post(COMPLETIONS, json=BODY).is_success
        assert not asked(router.consumers[0])


class TestWithoutProducers:
    @pytest.fixture(params=["recompute", "refuse"])
    def left(
        self, request: pytest.FixtureRequest, start_router: Start, eventually: Eventually
    ) -> tuple[str, Router]:
        router = start_router("--degrade", request.param)
        for producer in router.producers:
            producer.kill()
        eventually(lambda: router.ready(0, 2))
        return request.param, router

    def test_consumers_compute_without_producers_unless_that_is_refused(
        self, left: tuple[str, Router]
    ) -> None:
        policy, router = left
        answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
        assert router.client.get("/readiness").status_code == 503
        assert router.count("degraded") == 1
        if policy == "recompute":
            assert answer.status_code == 200
            assert "producer=-" in answer.headers["x-pdkit-trace"]
            assert router.client.get("/health").json()["status"] == "degraded"
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == "no producer can compute"
            assert router.client.get("/health").status_code == 503
        for consumer in router.consumers:
            consumer.kill()
        answer = router.client.post(COMPLETIONS, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert router.client.get("/liveness").status_code == 200


class TestAClientThatLeaves:
    @pytest.mark.parametrize(
        ("role", "stream", "does"),
        [
            ("producers", False, stand_in.waits),
            ("consumers", False, stand_in.waits),
            ("consumers", True, stand_in.waits_between_events),
        ],
    )
    def test_a_client_that_disconnects_leaves_no_request(
        self, router: Router, eventually: Eventually, role: str, stream: bool, does: Any
    ) -> None:
        for engine in getattr(router, role):
            engine.does = does
        before = router.count("cancelled")
        body = json.dumps({**BODY, "stream": stream}).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", router.port), 60) as client:
            client.sendall(head.encode() + body)
            eventually(lambda: asked(*getattr(router, role)))
        eventually(lambda: sum(engine.left for engine in getattr(router, role)) == 1)
        eventually(lambda: router.count("cancelled") == before + 1)
        if role == "producers":
            assert not asked(*router.consumers)


def test_every_pair_takes_its_turn(router: Router) -> None:
    pairs = set()
    for _ in range(4):
        answer = router.client.post(COMPLETIONS, json=BODY, headers=TRACED)
        pairs.add(tuple(engine.name for engine in the_two(router, answer)))
    assert len(pairs) == 4


def test_the_engine_with_the_fewest_requests_is_next(
    router: Router, eventually: Eventually
) -> None:
    for consumer in router.consumers:
        consumer.does = stand_in.waits
    threads = [
        threading.Thread(target=lambda: router.client.post(COMPLETIONS, json=BODY))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(asked(*router.consumers)) == 6)
    assert [len(asked(consumer)) for consumer in router.consumers] == [3, 3]
    for consumer in router.consumers:
        consumer.go.set()
    for thread in threads:
        thread.join(20)


def test_connections_that_engines_close_cost_no_request(router: Router) -> None:
    for _ in range(10):
        assert router.client.post(COMPLETIONS, json=BODY).is_success
        for consumer in router.consumers:
            consumer.drop_idle()
    assert len(asked(*router.consumers)) == 10, "none was sent twice"
