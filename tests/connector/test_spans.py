"""Spans of the connector: under the trace of the request, and none where that has none."""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from types import SimpleNamespace

import pytest
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pdkit_connector import spans, store_barrier
from pdkit_connector.connector import PatchedLMCacheConnector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch):
    """What vLLM's exporter would send."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def connector():
    """A scheduler's and worker's connector in one, over an LMCache that finds 512 tokens."""
    one = object.__new__(PatchedLMCacheConnector)
    one._connector_metadata = None
    one._lookups = {}
    one._lmcache_engine = SimpleNamespace(
        get_num_new_matched_tokens=lambda *_: 512,
        update_state_after_alloc=lambda *_: None,
        build_connector_meta=lambda _: LMCacheConnectorMetadata(),
        start_load_kv=lambda *_, **__: None,
        request_finished=lambda *_: (False, None),
    )
    return one


def request(headers=HEADERS):
    return SimpleNamespace(request_id="a", trace_headers=headers)


def step(one, *requests):
    """Schedule requests, and do the worker's part with what is sent to it."""
    for asked in requests:
        found, _ = one.get_num_new_matched_tokens(asked, 0)
        one.update_state_after_alloc(asked, None, found)
    sent = pickle.dumps(one.build_connector_meta(None))
    one._connector_metadata = pickle.loads(sent)  # noqa: S301 - our own
    one.start_load_kv(None)


def test_lookup_and_load_are_steps_of_the_engine_s_request(exported):
    step(connector(), request())
    lookup, load = exported()
    assert (lookup.name, load.name) == ("lookup", "load")
    for span in (lookup, load):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.start_time <= span.end_time
    assert lookup.attributes == {"pdkit.found_tokens": 512}
    assert load.attributes == {"pdkit.tokens": 512}


def test_engines_whose_cores_have_one_seed_do_not_share_ids(exported):
    for _ in range(2):
        random.seed(0)  # as vLLM does in each core
        step(connector(), request())
    assert len({span.context.span_id for span in exported()}) == 4


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "garbage"},
        {"traceparent": f"00-{32 * '0'}-{PARENT}-01"},
        {"tracestate": "a=b"},
    ],
)
def test_headers_that_name_no_trace_are_ignored(exported, headers):
    """vLLM passes on what a client sent, and an exception here would end its core."""
    step(connector(), request(headers))
    assert exported() == ()


def test_a_load_is_noted_in_its_own_step_only(exported):
    one = connector()
    step(one, request())
    step(one)
    assert [span.name for span in exported()] == ["lookup", "load"]


def test_a_lookup_that_is_not_ready_has_no_span_yet(exported):
    one = connector()
    one._lmcache_engine.get_num_new_matched_tokens = lambda *_: None
    assert one.get_num_new_matched_tokens(request(), 0)[0] is None
    assert not exported()


def test_a_request_that_waits_for_blocks_has_one_lookup(exported):
    one = connector()
    waiting = request()
    one.get_num_new_matched_tokens(waiting, 0)
    first_until = time.time_ns()
    one._lmcache_engine.get_num_new_matched_tokens = lambda *_: 256
    for _ in range(3):
        one.get_num_new_matched_tokens(waiting, 0)
    assert not exported()
    one.update_state_after_alloc(waiting, None, 512)
    (lookup,) = exported()
    assert lookup.attributes == {"pdkit.found_tokens": 512}
    assert lookup.end_time <= first_until
    assert not one._lookups


def test_a_request_that_ends_without_blocks_is_forgotten(exported):
    one = connector()
    one.get_num_new_matched_tokens(request(), 0)
    assert one.request_finished(request(), []) == (False, None)
    assert not one._lookups
    assert not exported()


def test_a_lookup_without_hits_has_no_load_span(exported):
    one = connector()
    one._lmcache_engine.get_num_new_matched_tokens = lambda *_: 0
    step(one, request())
    (lookup,) = exported()
    assert lookup.attributes == {"pdkit.found_tokens": 0}


@pytest.mark.parametrize("headers", [None, {}])
def test_a_request_without_a_trace_has_no_span(exported, headers):
    step(connector(), request(headers))
    assert not exported()


def test_a_trace_that_is_not_sampled_has_no_spans(exported):
    unwanted = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    step(connector(), request(unwanted))
    assert not exported()


def test_the_wait_at_the_store_barrier_is_the_store_span(exported, monkeypatch):
    async def answer(_name, _worker, _limit_s):
        return True

    monkeypatch.setattr(store_barrier, "engine_name", lambda: "engine")
    monkeypatch.setattr(store_barrier, "stored", answer)

    async def engine(_scope, _receive, send):
        await send({"type": "http.response.body", "body": b"a secret answer"})

    async def send(_message):
        pass

    middleware = store_barrier.HoldUntilStored(engine)
    scope = {"type": "http", "method": "POST"}
    asyncio.run(middleware(scope, None, send))
    assert not exported()
    traced = [
        (b"authorization", b"Bearer secret"),
        (b"traceparent", HEADERS["traceparent"].encode()),
    ]
    asyncio.run(middleware({**scope, "headers": traced}, None, send))
    (store,) = exported()
    assert (store.name, dict(store.attributes)) == ("store", {"pdkit.result": "stored"})
    assert f"{store.context.trace_id:032x}" == TRACE
    assert "secret" not in store.to_json()


def test_a_clock_that_goes_back_gives_no_negative_span(exported):
    spans.note("load", HEADERS, time.time_ns() + 10**12)
    (span,) = exported()
    assert span.start_time == span.end_time
