"""Clients leave in every phase of a request, with vLLM's scheduler and both connector sides."""

from __future__ import annotations

import pytest
from mp_engine import CHUNK, STEP, Engine, engine_config

TOKENS = 3 * CHUNK + 40
KIT = "PatchedLMCacheMPConnector", "pdkit_connector.server_connector"


@pytest.fixture(
    scope="module", params=[("kv_producer", 1), ("kv_producer", 2), ("kv_consumer", 1)], ids=str
)
def config(request, tmp_path_factory):
    role, ranks = request.param
    return engine_config(tmp_path_factory.mktemp("model"), *KIT, role, ranks)


@pytest.fixture
def engine(config, monkeypatch):
    """Return an engine that answers one client, and whose server has three chunks of any prompt."""
    one = Engine(config, monkeypatch)
    one.add("stays", 100, answer=60)
    one.step()
    one.server.has_chunks = 3
    return one


def waits(engine):
    engine.add("leaves", TOKENS)
    engine.leave("leaves")


def looks_up(engine):
    engine.server.hold_lookups()
    engine.add("leaves", TOKENS)
    engine.steps(2)
    engine.leave("leaves")


def finds_no_room(engine):
    engine.server.has_chunks = 0
    engine.add("large", 1500, answer=100)
    engine.steps(4)
    engine.server.has_chunks = 3
    engine.add("leaves", TOKENS)
    engine.steps(2)
    assert engine.state("leaves") == "WAITING"
    assert engine.server.locked["leaves"] == 3 * len(engine.ranks)
    engine.leave("leaves")
    assert engine.server.locked["leaves"] == 0


def begins_to_load(engine):
    engine.add("leaves", TOKENS)
    engine.step(scheduled=lambda: engine.leave("leaves"))


def has_begun_to_load(engine):
    engine.add("leaves", TOKENS)
    engine.step(computed=lambda: engine.leave("leaves"))


def loads(engine):
    engine.add("leaves", TOKENS)
    engine.steps(3)
    assert engine.state("leaves") == "WAITING_FOR_REMOTE_KVS"
    engine.leave("leaves")


def has_loaded_on_one_rank(engine):
    engine.add("leaves", TOKENS)
    engine.steps(2)
    engine.end("load", rank=0)
    engine.steps(2)
    engine.leave("leaves")


def loads_to_the_end_in_that_step(engine, works=True):
    engine.add("leaves", TOKENS)
    engine.step()
    engine.end("load", works=works)
    engine.step(computed=lambda: engine.leave("leaves"))


def fails_to_load_in_that_step(engine):
    loads_to_the_end_in_that_step(engine, works=False)


def has_loaded(engine, works=True):
    engine.add("leaves", TOKENS)
    engine.step()
    engine.end("load", works=works)
    engine.step()
    assert engine.state("leaves") == "WAITING_FOR_REMOTE_KVS"
    engine.leave("leaves")


def has_failed_to_load(engine):
    has_loaded(engine, works=False)


def fails_to_load_afterwards(engine):
    loads(engine)
    engine.step()
    engine.end("load", works=False)


def loads_from_a_server_that_ends(engine):
    loads(engine)
    for worker, transfers in zip(engine.workers, engine.ranks, strict=True):
        transfers.under_way.clear()
        worker.worker_adapter._health_event.clear()
    engine.server.locked.clear()
    engine.server.has_chunks = 0
    engine.steps(2)


def runs(engine):
    engine.add("leaves", TOKENS, answer=50)
    engine.step()
    engine.end("load")
    engine.steps(3)
    assert engine.state("leaves") == "RUNNING"
    engine.leave("leaves")


def stores_a_step(engine):
    engine.server.has_chunks = 0
    engine.add("leaves", 3 * STEP)
    engine.steps(2)
    assert any(one.under_way for one in engine.ranks) == engine.stores
    engine.leave("leaves")


def stores_in_that_step(engine):
    engine.server.has_chunks = 0
    engine.add("leaves", 3 * STEP)
    engine.step()
    engine.step(computed=lambda: engine.leave("leaves"))


def has_its_answer_and_stores(engine):
    engine.server.has_chunks = 0
    engine.add("leaves", TOKENS, answer=1)
    engine.steps(4)
    assert engine.freed["leaves"] == (not engine.stores)
    engine.leave("leaves")


def preempted(engine):
    engine.server.has_chunks = 0
    engine.add("leaves", TOKENS, answer=50)
    engine.steps(3)
    engine.end("store")
    request = engine.scheduler.requests["leaves"]
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("leaves")
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.kv_cache_manager.evict_blocks(set(blocks))


def is_preempted(engine):
    preempted(engine)
    engine.leave("leaves")


def loads_again_after_it_was_preempted(engine):
    preempted(engine)
    engine.server.has_chunks = 3
    engine.steps(2)
    assert engine.loading_of("leaves") == len(engine.ranks)
    engine.leave("leaves")


PHASES = [
    waits, looks_up, finds_no_room, begins_to_load, has_begun_to_load, loads,
    has_loaded_on_one_rank, loads_to_the_end_in_that_step, fails_to_load_in_that_step, has_loaded,
    has_failed_to_load, fails_to_load_afterwards, loads_from_a_server_that_ends, runs,
    stores_a_step, stores_in_that_step, has_its_answer_and_stores, is_preempted,
    loads_again_after_it_was_preempted,
]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_client_that_leaves_frees_its_blocks_once_and_under_no_transfer(engine, phase):
    phase(engine)
    engine.add("comes", 900, answer=4)
    engine.steps(6)
    if engine.loading_of("leaves"):
        assert engine.freed["leaves"] == 0
    engine.finish()
    assert engine.freed["leaves"] == engine.freed["stays"] == engine.freed["comes"] == 1
    assert engine.answers["stays"] == 60
    assert engine.answers["comes"] == 4
    assert engine.free_blocks == 63
    assert not any(engine.server.locked.values()), engine.server.locked
    asked = engine.server.asked_for("leaves")
    assert asked.count("end_session") == 1
    assert "load" not in asked[asked.index("end_session") :], "the load opens its session again"
    assert engine.nothing_noted()
