"""Layerwise mode of the installed LMCache with its fixes, driven as vLLM's worker drives it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
from lmcache.v1.cache_engine import LMCacheEngine
from pdkit_connector.fixes import b02a_stale_storers as b02a
from pdkit_connector.fixes import b02b_frozen_store as b02b
from pdkit_connector.fixes import b02c_unhealthy_store as b02c
from pdkit_connector.fixes import b02d_retrieve_miss as b02d
from pdkit_connector.fixes import b02e_unhealthy_retrieve as b02e
from pdkit_connector.fixes import b02f_unpin as b02f
from pdkit_connector.fixes import b02g_storer_errors as b02g
from pdkit_connector.fixes import b16c_layerwise_tags as b16c
from pdkit_connector.fixes import b18_layerwise_shortfall as b18
from pdkit_connector.in_engine.adapter_miniature import idle_adapter
from pdkit_connector.in_engine.layer_steps import idle_engine, replace_method
from pdkit_connector.log import get_logger
from pdkit_connector.registry import FixState, Need, Setting, apply_fix

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))

from layerwise_engine import Worker, filled, make_engine, request
from layerwise_sequences import SEQUENCES, Model

ALL = (b02a, b02b, b02c, b02d, b02e, b02f, b16c, b18, b02g)
NO_ENGINE = Setting()


@pytest.fixture
def untouched(restored):
    """Put back after the test whatever a layerwise fix replaces."""
    restored(LMCacheEngine, "store_layer", "retrieve_layer")
    restored(LMCacheConnectorV1Impl, "start_load_kv", "save_kv_layer")
    restored(LMCacheConnectorV1Impl, "wait_for_save", "get_finished")
    restored(LMCacheConnectorV1Impl, "get_block_ids_with_load_errors")


@pytest.fixture
def fixed(untouched):
    for module in sorted(ALL, key=lambda module: module.FIX.order):
        assert apply_fix(module.FIX, NO_ENGINE).state in (FixState.APPLIED, FixState.NOT_NEEDED)


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture
def log(monkeypatch):
    """Return the lines that the connector logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(get_logger(), "handlers", [handler])
    return lines


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.__name__)
def test_a_worker_survives_every_sequence(fixed, engine, sequence):
    sequence(engine)


def test_the_sequences_detect_wrong_kv(fixed, engine, monkeypatch):
    swapped = {0: 1, 1: 0, 2: 2}
    layer = Model.layer
    monkeypatch.setattr(Model, "layer", lambda self, index: layer(self, swapped[index]))
    with pytest.raises(AssertionError, match="wrong KV in layer"):
        SEQUENCES[0](engine)


def test_a_failed_store_is_logged_once_and_names_its_request(fixed, engine, log):
    engine.gpu_connector.fails_at = (0, 0)
    Worker(engine).step(request("a", 16), request("b", 16, first_slot=32, seed=1))
    assert log == [
        "pdkit-connector ERROR layerwise store of request a dropped: "
        "RuntimeError: no copy of layer 0"
    ]


def test_a_failed_store_gives_its_memory_back(fixed, engine, log):
    pool = engine.storage_manager.allocator_backend.memory_allocator
    engine.gpu_connector.fails_at = (1, 0)
    worker = Worker(engine)
    worker.step(request("a", 16))
    # Layer 0 was stored before layer 1 failed; the rest is free again.
    layer = pool.pin_allocator.total_allocated_size
    for seed in range(1, 5):
        worker.step(request("a", 16, seed=seed))
    assert pool.pin_allocator.total_allocated_size == 5 * layer
    assert len(log) == 5


def test_a_loop_over_a_store_still_sees_its_end_and_its_error(fixed, engine):
    store = engine.store_layer([1] * 8, slot_mapping=request("a", 8).slot_mapping, req_id="a")
    assert len(list(store)) == engine.num_layers + 1
    engine.gpu_connector.fails_at = (0, 0)
    with pytest.raises(RuntimeError, match="no copy"):
        list(engine.store_layer([2] * 8, slot_mapping=request("a", 8).slot_mapping, req_id="a"))


def test_an_error_of_a_load_is_not_hidden_by_the_fix_for_stores(untouched, monkeypatch):
    def raising(self, tokens, mask=None, **kwargs):
        yield
        raise ConnectionError("lost")

    monkeypatch.setattr(LMCacheEngine, "retrieve_layer", raising)
    b02g.FIX.apply(NO_ENGINE)
    load = idle_engine().retrieve_layer([1])
    next(load)
    with pytest.raises(ConnectionError):
        next(load)
    with pytest.raises(StopIteration):
        next(load)


def test_an_error_of_a_load_fails_its_blocks_alone(fixed, engine, log, monkeypatch):
    worker = Worker(engine)
    filled(engine, 0, 16)
    worker.step(request("a", 16))
    get = engine.storage_manager.layerwise_batched_get
    calls = []

    def lost_first(keys, **kwargs):
        calls.append(keys)
        if len(calls) == 1:
            raise ConnectionError("lost")
        return get(keys, **kwargs)

    monkeypatch.setattr(engine.storage_manager, "layerwise_batched_get", lost_first)
    loads = [
        request(req_id, 16, first_slot=slot, saved=None, load=(0, 16))
        for req_id, slot in (("b", 32), ("c", 64))
    ]
    assert worker.step(*loads) == {8, 9, 10, 11}
    assert engine.gpu_connector.kv[:, 64:80].all()
    assert log == ["pdkit-connector ERROR layerwise load failed: ConnectionError: lost"]


def test_stale_storers_are_dropped_even_if_a_step_ends_with_an_error():
    class Adapter:
        def wait_for_save(self):
            self.seen = list(self.layerwise_storers)
            raise ValueError("end")

    adapter = Adapter()
    with pytest.raises(ValueError, match="end"):
        b02a._cleared(Adapter.wait_for_save, adapter)
    assert (adapter.seen, adapter.layerwise_storers) == ([], [])


def test_a_short_miss_is_not_taken_for_an_unhealthy_engine(untouched, monkeypatch):
    def same(self, tokens, mask=None, **kwargs):
        yield from [None] * 4

    monkeypatch.setattr(LMCacheEngine, "retrieve_layer", same)
    assert b02e.FIX.probe(NO_ENGINE).need is Need.NOT_NEEDED


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.parametrize("layerwise", [True, False])
def test_pins_are_released_once_and_only_for_finished_requests(fixed, role, layerwise):
    released = []
    engine = idle_engine()
    engine.lookup_pins = dict.fromkeys(("running", "aborted", "waiting"))

    def unpin(req_id):
        if req_id in engine.lookup_pins:
            del engine.lookup_pins[req_id]
            released.append(req_id)

    engine.lookup_unpin = unpin
    worker = Worker(engine, role=role)
    worker.adapter.use_layerwise, worker.adapter.config = layerwise, None
    worker.begin(request("running", 16, saved=None))
    worker.end({"aborted"})
    worker.begin()
    worker.end({"aborted", "running"})
    assert sorted(released) == ["aborted", "running"]
    assert list(engine.lookup_pins) == ["waiting"]


def test_an_adapter_without_an_engine_has_nothing_to_release(fixed):
    adapter = idle_adapter(SimpleNamespace(num_layers=1))
    adapter._manager.lmcache_engine = None
    assert adapter.get_finished({"a"}) == (None, None)
    adapter.wait_for_save()


@pytest.mark.parametrize("module", ALL)
def test_probes_leave_the_loggers_on(untouched, module):
    module.FIX.probe(NO_ENGINE)
    names = "lmcache.v1.cache_engine", "lmcache.integration.vllm.vllm_v1_adapter", "pdkit_connector"
    assert not any(logging.getLogger(name).disabled for name in names)


TAGS = {"lmcache.tag.tenant": "7"}


def test_a_prompt_stored_and_loaded_in_parts_keeps_its_tags(fixed, engine):
    """A prompt that is computed in two steps, and loaded behind a chunk that vLLM has."""
    worker = Worker(engine)
    stored = filled(engine, 0, 16)
    worker.step(request("a", 8, configs=TAGS))
    worker.step(request("a", 16, saved=8, configs=TAGS))
    tokens = list(range(16))
    assert engine.lookup(tokens=tokens, lookup_id="look", request_configs=TAGS) == 16
    assert engine.lookup(tokens=tokens, lookup_id="look") == 0
    load = request("b", 16, first_slot=64, saved=None, load=(8, 16), configs=TAGS)
    assert worker.step(load) == set()
    kv = engine.gpu_connector.kv[:, 64:80]
    assert kv[:, 8:].equal(stored[:, 8:]) and not kv[:, :8].any()


def test_a_load_whose_tags_nobody_stored_is_reported(fixed, engine):
    worker = Worker(engine)
    filled(engine, 0, 16)
    worker.step(request("a", 16))
    load = request("b", 16, first_slot=64, saved=None, load=(0, 16), configs=TAGS)
    assert worker.step(load) == {16, 17, 18, 19}


@pytest.mark.parametrize(
    ("mode", "configs", "labelled"),
    [
        ({}, TAGS, True),
        ({}, None, False),
        ({}, {}, False),
        ({"use_layerwise": False}, TAGS, False),
        # The blender loads without tags, so what it loads must be stored without.
        ({"enable_blending": True}, TAGS, False),
    ],
)
def test_only_tokens_with_tags_are_labelled(untouched, mode, configs, labelled):
    b16c.FIX.apply(NO_ENGINE)
    worker = Worker(idle_engine())
    worker.adapter.__dict__.update(mode)
    one = request("a", 16, configs=configs)
    worker.begin(one)
    worker.begin(one)  # a step that is begun twice labels once
    assert one.token_ids == list(range(16))
    assert (type(one.token_ids) is not list) == labelled
    if labelled:
        assert one.token_ids.configs == one.token_ids[:8].configs == TAGS
        assert type(one.token_ids[3]) is int


@pytest.mark.parametrize(
    ("fixed", "left"), [("store_layer", "loaded"), ("retrieve_layer", "stored")]
)
def test_half_a_fix_does_not_count_as_applied(untouched, fixed, left):
    for call in ("start_load_kv", "save_kv_layer"):
        replace_method(LMCacheConnectorV1Impl, call, b16c._labelling)
    replace_method(LMCacheEngine, fixed, b16c._with_configs)
    probed = b16c.FIX.probe(NO_ENGINE)
    assert probed.need is Need.NEEDED
    assert probed.evidence == f"a layer is {left} without its tags"


def test_labelling_only_the_first_call_fixes_nothing(untouched):
    """Newer vLLM calls it behind the model where there is nothing to load."""
    replace_method(LMCacheConnectorV1Impl, "start_load_kv", b16c._labelling)
    for moved in ("store_layer", "retrieve_layer"):
        replace_method(LMCacheEngine, moved, b16c._with_configs)
    assert b16c.FIX.probe(NO_ENGINE).evidence == "a layer is stored without its tags"
