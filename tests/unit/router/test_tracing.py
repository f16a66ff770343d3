"""Traces: what a collector gets, by OTLP's definition, and what it costs if it takes nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvloop
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pdkit_router import tracing
from pdkit_router.request import Request
from pdkit_router.tracing import Tracer
from pdkit_router.upstream import Connections, EngineLost

from tests.ports import unused_port
from tests.unit.router import stand_in
from tests.unit.router.conftest import KEY, Router, Start
from tests.unit.router.stand_in import Loop, StandIn
from tests.unit.router.test_resume import ASKED, WHOLE, Model, text_of

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "x", "max_tokens": 5, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT, ERROR = 2, 3, 2
Eventually = Callable[..., None]


def parsed(body: bytes) -> list[dict[str, Any]]:
    """Return the spans of a request to a collector; fails where OTLP's definition is not kept."""
    said = json.loads(body)
    spans = []
    for resource in said["resourceSpans"]:
        named = plain(resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            spans += [{**span, "resource": named} for span in scope["spans"]]
            for span in scope["spans"]:  # protobuf's JSON has base64 where OTLP's has hex
                assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
                assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
                assert re.fullmatch(r"([0-9a-f]{16})?", span["parentSpanId"])
    ids = re.sub(
        rb'("(?:traceId|spanId|parentSpanId)": ")([0-9a-f]*)"',
        lambda found: found[1] + base64.b64encode(bytes.fromhex(found[2].decode())) + b'"',
        body,
    )
    ParseDict(json.loads(ids), ExportTraceServiceRequest())
    for span in spans:
        assert isinstance(span["startTimeUnixNano"], str), "64-bit numbers are text"
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    return spans


def plain(attributes: list[dict[str, Any]]) -> dict[str, str]:
    return {one["key"]: next(iter(one["value"].values())) for one in attributes}


async def takes(_: StandIn, to: stand_in.Connection) -> None:
    await to.whole(200, b"{}")


@dataclass
class Traced:
    """A router that sends spans, and the collector."""

    router: Router
    collector: StandIn
    eventually: Eventually

    def spans(self, trace: str, count: int) -> list[dict[str, Any]]:
        """Return the spans of a trace when there are so many, the earliest first."""
        self.eventually(lambda: len(self._found(trace)) >= count)
        return sorted(self._found(trace), key=lambda span: int(span["startTimeUnixNano"]))

    def _found(self, trace: str) -> list[dict[str, Any]]:
        every = [span for seen in list(self.collector.seen) for span in parsed(seen.body)]
        return [span for span in every if span["traceId"] == trace]

    def trace(self) -> str:
        """Return the trace of the last request, as an engine was told it."""
        return traceparents(self.router)[0].split("-")[1]


def traceparents(router: Router) -> list[str]:
    """Return what engines were told, producers first."""
    return [
        seen.headers["traceparent"]
        for engine in (*router.producers, *router.consumers)
        for seen in engine.seen
        if seen.method == "POST" and seen.path != "/detokenize"  # the router's own question
    ]


@pytest.fixture(scope="module")
def started(loop: Loop, start_router: Start, tmp_path_factory: Any) -> tuple[Router, StandIn]:
    collector = StandIn(loop, "collector")
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text(KEY)
    endpoint = f"http://127.0.0.1:{collector.port}/base/"
    options = ("--otlp-endpoint", endpoint, "--stack", "mine", "--engine-key-file", str(key))
    return start_router(*options), collector


@pytest.fixture
def traced(started: tuple[Router, StandIn], eventually: Eventually) -> Iterator[Traced]:
    router, collector = started
    for one in (*router.engines, collector):
        one.reset()
    collector.does = takes
    eventually(router.ready)
    yield Traced(router, collector, eventually)
    collector.go.set()


def test_a_direct_hand_off_is_in_the_trace(
    loop: Loop, start_router: Start, eventually: Eventually
) -> None:
    """With its outcome, and the ids that engines' logs have."""
    collector = StandIn(loop, "collector")
    collector.does = takes
    endpoint = f"http://127.0.0.1:{collector.port}"
    router = start_router("--otlp-endpoint", endpoint, "--handoff", "direct")
    assert router.client.post(COMPLETIONS, json=BODY).status_code == 200
    traced = Traced(router, collector, eventually)
    root, prefill, decode = traced.spans(traced.trace(), 3)
    assert [one["name"] for one in (prefill, decode)] == ["prefill", "decode"]
    told = plain(root["attributes"])
    ids = [
        seen.headers["x-request-id"]
        for engine in (*router.producers, *router.consumers)
        for seen in engine.seen
        if seen.method == "POST"
    ]
    assert told["pdkit.handoff"] == "none", "these producers prepare nothing"
    assert ids == [f"{told['pdkit.engine_id']}-{n}" for n in (1, 2)]


def test_a_request_and_its_two_phases_are_one_trace(traced: Traced) -> None:
    assert traced.router.client.post(COMPLETIONS, json=BODY).status_code == 200
    root, prefill, decode = traced.spans(traced.trace(), 3)
    assert [one["name"] for one in (root, prefill, decode)] == [
        "POST /v1/completions", "prefill", "decode",
    ]  # fmt: skip
    assert [one["kind"] for one in (root, prefill, decode)] == [SERVER, CLIENT, CLIENT]
    assert [one["parentSpanId"] for one in (root, prefill, decode)] == [
        "", root["spanId"], root["spanId"],
    ]  # fmt: skip
    assert traceparents(traced.router) == [
        f"00-{root['traceId']}-{one['spanId']}-01" for one in (prefill, decode)
    ]
    engines = [plain(one["attributes"])["pdkit.engine"] for one in (prefill, decode)]
    told = plain(root["attributes"])
    assert engines == [told["pdkit.producer"], told["pdkit.consumer"]]
    assert (told["http.response.status_code"], told["pdkit.tries"]) == ("200", "2")
    assert told["pdkit.cached_tokens"] == "7"
    assert root["resource"] == {"service.name": "router", "service.namespace": "mine"}
    (posted,) = {(seen.path, seen.headers["content-type"]) for seen in traced.collector.seen}
    assert posted == ("/base/v1/traces", "application/json")


def test_a_stream_is_traced_to_its_end(traced: Traced) -> None:
    for consumer in traced.router.consumers:
        consumer.does = stand_in.waits_between_events
    with traced.router.client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as answer:
        trace = traced.trace()
        (prefill,) = traced.spans(trace, 1)
        for consumer in traced.router.consumers:
            consumer.go.set()
        answer.read()
    assert prefill["name"] == "prefill"
    root = traced.spans(trace, 3)[0]
    assert root["status"] == {}


def test_a_client_s_own_trace_goes_on(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traced.router.client.post(COMPLETIONS, json=BODY, headers=headers)
    assert traced.spans(TRACE, 3)[0]["parentSpanId"] == PARENT


@pytest.mark.parametrize(
    "bad",
    [
        [f"00-{TRACE}-{PARENT}"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"],
    ],
)
def test_invalid_traces_of_clients_are_ignored(bad: list[str]) -> None:
    tracer = Tracer("http://127.0.0.1:9", "mine", Counter())
    request = Request("POST", COMPLETIONS, [("traceparent", one) for one in bad])
    span = tracer.request(request.method, request.path, request.headers)
    assert span.trace != TRACE
    assert (span.parent, span.sampled) == ("", True)


def test_a_client_that_wants_no_record_gets_none(traced: Traced) -> None:
    unwanted = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}
    traced.router.client.post(COMPLETIONS, json=BODY, headers=unwanted)
    assert all(one.endswith("-00") for one in traceparents(traced.router))
    wanted = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traced.router.client.post(COMPLETIONS, json=BODY, headers=wanted)
    traced.spans(TRACE, 3)
    assert not traced._found(TRACE[::-1])


def test_an_engine_that_fails_and_the_next_one(traced: Traced) -> None:
    for producer in traced.router.producers:
        producer.does = stand_in.fails
    traced.router.client.post(COMPLETIONS, json=BODY)
    root, first, second, decode = traced.spans(traced.trace(), 4)
    assert [one["status"] for one in (root, first, second, decode)] == [
        {}, {"code": ERROR}, {"code": ERROR}, {},
    ]  # fmt: skip
    assert plain(first["attributes"])["http.response.status_code"] == "500"
    assert plain(root["attributes"])["pdkit.producer"] == "-"


def test_a_stream_that_ends_early_failed(traced: Traced) -> None:
    for consumer in traced.router.consumers:
        consumer.does = stand_in.streams_half
        consumer.go.set()
    body = {**BODY, "stream": True, "logprobs": 1}
    assert "not complete" in traced.router.client.post(COMPLETIONS, json=body).text
    root = traced.spans(traced.trace(), 3)[0]
    assert root["status"] == {"code": ERROR}
    assert plain(root["attributes"])["error.type"] == "EngineLost"


def test_the_engine_that_broke_off_is_marked_and_not_the_next_one(traced: Traced) -> None:
    model = Model([4])
    for engine in traced.router.engines:
        engine.does = model
    answer = traced.router.client.post(COMPLETIONS, json=ASKED[COMPLETIONS])
    assert text_of(answer.content) == WHOLE
    root, _, lost, other = traced.spans(traced.trace(), 4)
    told = plain(lost["attributes"])
    assert (told["error.type"], told["http.response.status_code"]) == ("EngineLost", "200")
    assert int(lost["endTimeUnixNano"]) <= int(other["startTimeUnixNano"])
    assert other["status"] == root["status"] == {}


def test_an_engine_that_broke_off_within_an_answer_is_marked(traced: Traced) -> None:
    async def breaks_off(engine: StandIn, to: stand_in.Connection) -> None:
        await to.send(b"HTTP/1.1 200 X\r\ncontent-length: 99999\r\n\r\n" + b"x" * 70_000)
        await asyncio.sleep(0.1)
        to.writer.transport.abort()

    for consumer in traced.router.consumers:
        consumer.does = breaks_off
    with pytest.raises(httpx.HTTPError):
        traced.router.client.post(COMPLETIONS, json=BODY)
    root, _, lost = traced.spans(traced.trace(), 3)
    found = [plain(one["attributes"])["error.type"] for one in (root, lost)]
    assert found == ["EngineLost", "EngineLost"]


def test_the_engine_that_hangs_until_the_limit_is_marked(
    loop: Loop, start_router: Start, eventually: Eventually
) -> None:
    collector = StandIn(loop, "collector")
    collector.does = takes
    endpoint = f"http://127.0.0.1:{collector.port}"
    router = start_router("--otlp-endpoint", endpoint, "--answer-s", "3")
    for consumer in router.consumers:
        consumer.does = stand_in.waits
    assert router.client.post(COMPLETIONS, json=BODY).status_code == 504
    traced = Traced(router, collector, eventually)
    _, _, hung = traced.spans(traced.trace(), 3)
    told = plain(hung["attributes"])
    assert told["error.type"] == "TimeoutError"
    assert "pdkit.cancelled" not in told


def test_traces_contain_no_text_key_or_query(traced: Traced) -> None:
    body = {**BODY, "prompt": "a-secret-prompt", "user": "a-secret-user"}
    headers = {
        "traceparent": f"00-{TRACE}-{PARENT}-01",
        "authorization": "Bearer a-secret-key",
        "tracestate": "a-secret-state",
    }
    asked = traced.router.client.post(f"{COMPLETIONS}?key=a-secret", json=body, headers=headers)
    assert asked.status_code == 200
    traced.spans(TRACE, 3)
    sent = b"".join(seen.body for seen in traced.collector.seen)
    assert b"a-secret" not in sent
    assert KEY.encode() not in sent
    assert all("authorization" not in seen.headers for seen in traced.collector.seen)


def test_a_collector_that_hangs_delays_nothing(traced: Traced) -> None:
    held = threading.Event()

    async def holds(engine: StandIn, to: stand_in.Connection) -> None:
        held.set()
        await engine.told()
        await takes(engine, to)

    def counted() -> list[int]:
        return [traced.router.count(f"spans_{name}") for name in ("sent", "dropped")]

    traced.collector.does = holds
    assert traced.router.client.post(COMPLETIONS, json=BODY).status_code == 200
    assert held.wait(20)
    before = counted()
    answers = [traced.router.client.post(COMPLETIONS, json=BODY) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert counted() == before, "the collector was still held"
    assert not traced.collector.left


def test_a_collector_that_is_gone_is_counted(start_router: Start, eventually: Eventually) -> None:
    router = start_router("--otlp-endpoint", f"http://127.0.0.1:{unused_port()}")
    assert router.client.post(COMPLETIONS, json=BODY).status_code == 200
    eventually(lambda: router.count("spans_dropped") == 3)
    assert router.count("spans_sent") == 0


@pytest.mark.parametrize("problem", [UnicodeError("label too long"), RuntimeError("any")])
def test_spans_of_a_failed_send_are_dropped(problem: Exception) -> None:
    counts = Counter[str]()
    tracer = Tracer("http://127.0.0.1:9", "mine", counts)

    async def ask(*_: object) -> tuple[int, bytes]:
        raise problem

    tracer._collector.ask = ask  # type: ignore[method-assign]
    with tracer.request("POST", COMPLETIONS, ()).running():
        pass
    asyncio.run(tracer.leave())
    assert counts == {"spans_dropped": 1}


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_host_name_that_cannot_be_resolved_is_no_connection(host: str) -> None:
    async def connect() -> None:
        with pytest.raises(EngineLost, match="refuses connections") as lost:
            await Connections(host, 9).get()
        assert not lost.value.asked

    uvloop.run(connect())


def test_the_queue_of_spans_is_limited() -> None:
    counts = Counter[str]()
    tracer = Tracer("http://127.0.0.1:9", "mine", counts)
    for _ in range(tracing._WAITING + 10):
        with tracer.request("POST", COMPLETIONS, ()).running():
            pass
    assert len(tracer._waiting) == tracing._WAITING
    assert counts["spans_dropped"] == 10


def test_a_client_that_leaves_is_not_an_error() -> None:
    ended: list[tracing.Span] = []
    tracer = Tracer("http://127.0.0.1:9", "mine", Counter())
    span = tracer.request("POST", COMPLETIONS, ())
    span.ended = ended.append
    with pytest.raises(asyncio.CancelledError), span.running():
        raise asyncio.CancelledError
    assert (ended, span.error, span.attributes["pdkit.cancelled"]) == ([span], "", 1)


def test_engines_get_no_trace_headers_without_an_endpoint(router: Router) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    router.client.post(COMPLETIONS, json=BODY, headers=headers)
    seen = [one for engine in router.engines for one in engine.seen if one.method == "POST"]
    assert len(seen) == 2
    assert all("traceparent" not in one.headers for one in seen)
    assert router.count("spans_sent") == router.count("spans_dropped") == 0
