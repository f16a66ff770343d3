"""The connector's share of its worker's steps: its calls, and nothing outside of a step."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from pdkit_connector import step_clock
from pdkit_connector.connector import PatchedLMCacheConnector
from pdkit_connector.counters import Counters
from pdkit_connector.server_connector import PatchedLMCacheMPConnector


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(step_clock, "perf_counter", lambda: now.s)
    return now


@pytest.fixture
def counters(monkeypatch):
    counted = Counters()
    monkeypatch.setattr(step_clock, "COUNTERS", counted)
    return counted


def parts(counters):
    return tuple(counters.value("step_seconds", part=part) for part in ("connector", "rest"))


@pytest.fixture
def connector(clock):
    """Each of its calls takes a second, and each layer's loads and saves half of one."""

    def taking(seconds):
        def call(*_args, **_kwargs):
            clock.s += seconds

        return call

    one = object.__new__(PatchedLMCacheConnector)
    one._connector_metadata = None
    one._lmcache_engine = SimpleNamespace(
        start_load_kv=taking(1),
        wait_for_layer_load=taking(0.5),
        save_kv_layer=taking(0.5),
        wait_for_save=taking(1),
        get_finished=lambda ids: taking(1)() or (ids, None),
    )
    return one


def step(connector, clock, *, layers=2):
    """Do what vLLM's runners do in a step; each layer takes ten seconds."""
    connector.bind_connector_metadata(object())
    connector.start_load_kv(None)
    for layer in range(layers):
        connector.wait_for_layer_load(f"layer {layer}")
        clock.s += 10
        connector.save_kv_layer(f"layer {layer}", None, None)
    connector.wait_for_save()
    assert connector.get_finished({"a"}) == ({"a"}, None)
    connector.clear_connector_metadata()


def test_a_steps_calls_and_the_rest_of_it_are_timed(connector, clock, counters):
    step(connector, clock)
    assert parts(counters) == (5, 20)
    step(connector, clock, layers=1)
    assert parts(counters) == (5 + 4, 20 + 10)


def test_a_step_that_computes_nothing_does_not_count(connector, clock, counters):
    connector.bind_connector_metadata(object())
    connector.start_load_kv(None)
    connector.get_finished({"a"})
    connector.clear_connector_metadata()
    assert counters.all() == []
    step(connector, clock)
    assert parts(counters) == (5, 20)


def test_time_between_steps_and_calls_outside_of_them_do_not_count(connector, clock, counters):
    connector.get_finished(set())
    clock.s += 1000
    connector.clear_connector_metadata()
    assert counters.all() == []
    step(connector, clock)
    assert parts(counters) == (5, 20)


def test_a_step_that_failed_is_left_out(connector, clock, counters):
    def fails(*_args, **_kwargs):
        clock.s += 7
        raise RuntimeError("no KV")

    begun = connector._lmcache_engine.start_load_kv
    connector._lmcache_engine.start_load_kv = fails
    with pytest.raises(RuntimeError, match="no KV"):
        step(connector, clock)
    connector._lmcache_engine.start_load_kv = begun
    step(connector, clock)
    assert parts(counters) == (5, 20)


@pytest.mark.parametrize("kind", [PatchedLMCacheConnector, PatchedLMCacheMPConnector])
def test_every_call_of_both_connectors_is_timed_once(kind):
    names = (*step_clock.CALLS, "bind_connector_metadata", "clear_connector_metadata")
    for name in names:
        method = getattr(kind, name)
        assert method.__globals__["__name__"] == step_clock.__name__, name
        assert method.__wrapped__.__globals__["__name__"] != step_clock.__name__, name


def test_timing_a_call_takes_at_most_a_few_microseconds(counters):
    """By CPU time, beside the same calls untimed."""
    plain = type("Plain", (), dict.fromkeys(
        (*step_clock.CALLS, "bind_connector_metadata", "clear_connector_metadata"),
        lambda *_args, **_kwargs: None,
    ))  # fmt: skip
    timed = step_clock.timed_steps(type("Timed", (plain,), {}))

    def call_us(one):
        began = time.thread_time()
        for _ in range(2000):
            one.wait_for_layer_load("layer")
        return 1e6 * (time.thread_time() - began) / 2000

    assert min(call_us(timed()) - call_us(plain()) for _ in range(10)) < 20
